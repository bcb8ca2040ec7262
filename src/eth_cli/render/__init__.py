"""Turns results into text for people: tables, Gantt charts, progress. Nothing else prints.

Domain objects know nothing of this package, and no decision is taken here.
"""
