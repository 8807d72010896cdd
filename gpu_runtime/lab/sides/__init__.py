"""
The sides of a measurement (ways to run an optimizer step, such as this runtime and native
training), under one interface: what each side runs, and with which dimensions.

`columns` lists the columns of the step tables, and `cells` lists the dimensions with which they
run. `pipelines` makes the sides of a pipeline over ranks. Only `megatron` imports Megatron-core.
"""
