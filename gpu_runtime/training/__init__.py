"""
Training of a decoder language model with the guarded pipeline: the model, the data, the training
loop and the commands.
"""
