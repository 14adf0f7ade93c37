"""Schedules of the objective weights. One module and one file in ``conf/weight_schedule`` make a schedule."""
