"""Tables of a summary, a module for each subject; `reporting.pages` has the tables of each command.

`specification` has the types. To add a column, add a `Column` to the subject's tuple.
"""
