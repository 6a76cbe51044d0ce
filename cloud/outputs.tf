# `terraform output -json > cloud.json` writes what `cleanrl_utils.submit_exp` reads. There is no secret in it.

output "region" {
  description = "AWS region of the queues."
  value       = var.region
}

output "job_queues" {
  description = "Queues by name (for --job-queue): the instance type, whether it is Spot, and the GPUs, vCPUs and MiB that a job can have of one machine."
  value       = module.cleanrl.job_queues
}

output "execution_role_arn" {
  description = "Role by which Batch pulls the image, reads the W&B secret and writes the log."
  value       = module.cleanrl.execution_role_arn
}

output "job_role_arn" {
  description = "Role of the script itself: reads and writes checkpoints."
  value       = module.cleanrl.job_role_arn
}

output "wandb_secret_arn" {
  description = "Secret that holds the W&B key, once you have put it there."
  value       = module.cleanrl.wandb_secret_arn
}

output "checkpoint_url" {
  description = "For --checkpoint-dir."
  value       = module.cleanrl.checkpoint_url
}

output "log_group" {
  description = "CloudWatch log group of the jobs."
  value       = module.cleanrl.log_group
}

output "submit_policy_arn" {
  description = "Policy for the people who submit jobs."
  value       = module.cleanrl.submit_policy_arn
}
