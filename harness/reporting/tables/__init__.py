"""Tables of a summary, one module a subject; `reporting.pages` says which command shows which.

`specification` says what a table is. To add a column, add a `Column` to the subject's tuple.
"""
