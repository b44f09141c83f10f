"""Colours and layout of the ladder's charts."""

from tightfit.page import label_of, styled

PAIR = ("#56b4e9", "#e8743b")
finished = styled
__all__ = ["PAIR", "finished", "label_of"]
