"""What `@af.job` and `fit` take, checked at one door; Evaluation and StopTraining as values."""
