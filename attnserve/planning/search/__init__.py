"""The search for a plan that meets a goal.

``docs/concepts/search.md`` explains the method and defines group, unit, option, choice and front.
"""
