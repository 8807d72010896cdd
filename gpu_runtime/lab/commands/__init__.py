"""
The commands of the measurement laboratory (`lab`); `qeffect.gpu_runtime.commands` lists them.
"""
