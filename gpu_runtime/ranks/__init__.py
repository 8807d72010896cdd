"""
A pipeline over real ranks: messages, the walk over one rank's row, and the consent of all ranks.
"""
