"""A few real steps, measured: wall seconds, every instruction of the compiled program, every array of its memory."""
