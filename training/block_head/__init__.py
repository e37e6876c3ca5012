"""Block heads (DSpark): the head, its training, its files, and the program that trains it."""
