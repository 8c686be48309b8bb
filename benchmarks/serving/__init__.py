"""What serving_load.py starts: the load generator, a bare session, and the peers.

Each file is a program of its own. The peers run in their own virtual environments, so they import
nothing of this project.
"""
