"""
The sides of a measurement, such as this runtime and native, under one interface: what each side
runs, and with which dimensions.

`columns` lists the columns of the step tables and `cells` their dimensions; `pipelines` makes the
sides of a pipeline over ranks. Only `megatron` imports Megatron-core.
"""
