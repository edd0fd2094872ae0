"""The decision log: one row a rollout in Parquet files, what was decided about it and why. Needs pyarrow.

``schema`` says what is in it, ``columns`` turns a step into a table, ``writer`` keeps the files, ``reader`` reads them.
"""
