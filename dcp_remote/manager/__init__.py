"""CheckpointManager, and what it is made of.

manager is the class; rank_save and rank_restore are one rank's part of its calls, coordinator the coordinator's;
background_save runs a save beside training; preemption stops all ranks at one step, sigterm handles the signal;
training_state makes a state, random_states is a part of it; reports, progress and telemetry tell how it went.
rank_checks is apart from these: checks that ranks make before a training.
"""
