"""A run's report as one page that needs nothing else: pure functions from data to text.

The page holds no script and loads nothing; what a pointer rests on is told by SVG titles.
"""
