"""Published measurements of real clusters and other planners' plans, held against eth's figures."""
