"""What another plan has to be predicted to gain over the plain one before it is taken."""

# it has to be predicted this much faster: on measured machines predictions are off by 5 % in the
# median, most of it common to all plans of a shape; a datasheet may be far off
MARGINS = {True: 1.03, False: 1.15}
# and this much: an eager call of a plan is the launch of a graph, which starts that much later than
# two kernels do (4xH200, 2026-11)
MIN_GAIN_S = 10e-6
