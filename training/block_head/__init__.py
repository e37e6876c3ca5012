"""Block heads (DSpark): the head, how it learns, how it is written, and the program that trains it."""
