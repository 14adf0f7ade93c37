"""Schedules of the KL coefficient. One module and one file in ``conf/kl_schedule`` make a schedule."""
