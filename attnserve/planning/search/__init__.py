"""The search for a plan that meets a goal.

``docs/concepts/search.md`` explains the method. Each stage takes the value of the one before:

1. Block, group (``BlockGroup``): blocks that are rewritten alike.
2. Configuration (``BlockConfig``): a block after a rewrite; its time and loss are measured.
3. Unit (``Unit``): the groups that are chosen together, one or a pair, with all their
   configurations (``UnitConfig``) and the predicted loss and time of each.
4. Choice (``Choice``): one configuration for each unit. The front (``Front``) has the choices that
   no other one beats, and makes their plans.
5. Candidate (``Candidate``): a choice with the model of its plan, measured on the rows to choose. A
   search of the front (``FrontSearch``) selects choices by the goal: ``FastestSearch`` keeps a
   quality, ``LeastLossySearch`` reaches a speed-up. ``Judge`` builds and measures the candidates.
6. Verified candidate (``VerifiedCandidate``): a candidate with its verifications on held-out
   rows.
7. Result (``SearchResult``): the plan of the verified candidate, or an empty one if it is not
   faster.

A ``PrecisionSearch`` goes to the best candidate of one precision (5), and then to the result.
``search_precisions`` compares several precisions before.
"""
