"""Maximum numbers of nodes that the matching follows from one value to another."""

MASK = 60
"""Nodes above a mask that are compared with those of another mask."""

PROJECTION = 40
"""Nodes between a projection and its product; rotary embeddings take about 12."""

FLATTENING = 4
"""``FLATTENS`` operators, which keep the order of elements, before a product."""

SCORES = 16
"""Nodes between scores and softmax; each may have two operands to search."""

REUSE = 8
"""Nodes between a softmax and a product that reuses it."""

QUANTIZED = 8
"""Nodes from a product with a quantized weight to its tokens, to its output, or to its reader."""
