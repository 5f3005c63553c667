"""What a training program calls besides torch: push_pull and its kin, CrossBarrier, LocalSteps, compression, priorities."""
