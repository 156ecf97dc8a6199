"""Numbers of attention that recipes and headers are checked by. Apart, for they need no torch."""

#: Columns of a head that one matrix instruction takes.
COLUMNS = 16

#: What ranges of calibration are multiplied by: other prompts go beyond them, and a float format
#: gives the room for nothing. 4 is no better than 2, and none costs SSIM .003.
MARGIN = 2.0
