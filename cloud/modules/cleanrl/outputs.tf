output "job_queues" {
  value = {
    for key, environment in local.environments : aws_batch_job_queue.this[key].name => {
      machine = environment.instance_type
      spot    = environment.spot
      gpus    = environment.gpus
      vcpus   = environment.vcpus
      # What the machine's system and the ECS agent leave to jobs is about 95 %, less on small machines. A job that
      # asks for more than is left stays RUNNABLE for ever.
      memory_mib = floor(environment.memory_mib * 0.9)
    }
  }
}

output "execution_role_arn" {
  value = aws_iam_role.execution.arn
}

output "job_role_arn" {
  value = aws_iam_role.job.arn
}

output "wandb_secret_arn" {
  value = aws_secretsmanager_secret.wandb.arn
}

output "checkpoint_url" {
  value = "s3://${aws_s3_bucket.checkpoints.id}"
}

output "log_group" {
  value = aws_cloudwatch_log_group.jobs.name
}

output "submit_policy_arn" {
  value = aws_iam_policy.submit.arn
}
