"""What train_eagle3.py is made of: the target that answers, the head, how it learns, how it is written."""
