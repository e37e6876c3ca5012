"""What train_block_head.py is made of: the head, how it learns, how it is written."""
