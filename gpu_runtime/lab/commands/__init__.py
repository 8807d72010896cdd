"""
The commands of the laboratory; `qeffect.gpu_runtime.commands` names them.
"""
