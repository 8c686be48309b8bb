"""Models of this package as objects of other libraries."""
