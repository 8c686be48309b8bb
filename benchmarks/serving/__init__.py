"""Parts of serving_load.py: load generator, bare session, peers, and how they are started.

The load generator, the bare session and the peers are programs. The peers run in separate virtual
environments, so they import nothing of this project.
"""
