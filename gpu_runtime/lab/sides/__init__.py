"""
The sides of a measurement, one interface over all: what each runs, and on what.

`columns` lists the columns of the step tables and `cells` their dimensions; `pipelines` makes the
sides of a pipeline over ranks. Only `megatron` imports Megatron-core.
"""
