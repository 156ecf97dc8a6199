"""The share of the matrix peak that Radeons reach, calibrated on kernels that others timed."""

#: (pessimistic, optimistic) share of what issue of a whole block allows: quartiles over thirteen
#: public kernels on RDNA3 and RDNA4 (``python docs/measure_cards.py``). It stands for what the
#: count of instructions leaves out: clocks under load, latencies, LDS, caches.
OF_ISSUE = (0.57, 0.75)
