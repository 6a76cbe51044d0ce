# Machines come when a job waits and go when none does (min_vcpus = 0): an idle installation costs cents a month.

terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 3.39, < 6.0"
    }
  }
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

data "aws_availability_zones" "all" {
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"] # no local zones
  }
}

data "aws_ec2_instance_type" "this" {
  for_each = local.instance_types

  instance_type = each.value

  lifecycle {
    postcondition {
      condition     = length(self.gpus) == 0 || sum(concat([0], self.gpus[*].count)) == local.gpus[each.key]
      error_message = "${each.value} has ${sum(concat([0], self.gpus[*].count))} GPUs: set gpu_type and gpu_count to what it has."
    }
  }
}

locals {
  smallest = { # with this many GPUs of this type
    "T4 x1"   = "g4dn.xlarge"
    "T4 x4"   = "g4dn.12xlarge"
    "T4 x8"   = "g4dn.metal"
    "A10G x1" = "g5.xlarge"
    "A10G x4" = "g5.12xlarge"
    "A10G x8" = "g5.48xlarge"
    "L4 x1"   = "g6.xlarge"
    "L4 x4"   = "g6.12xlarge"
    "L4 x8"   = "g6.48xlarge"
    "L40S x1" = "g6e.xlarge"
    "L40S x4" = "g6e.12xlarge"
    "L40S x8" = "g6e.48xlarge"
    "A100 x8" = "p4d.24xlarge"
    "H100 x1" = "p5.4xlarge"
    "H100 x8" = "p5.48xlarge"
  }
  instance_types = {
    for key, machine in var.machines :
    key => machine.instance_type != null ? machine.instance_type : local.smallest["${machine.gpu_type} x${machine.gpu_count}"]
  }
  gpus = { for key, machine in var.machines : key => machine.gpu_type == null ? 0 : machine.gpu_count }
  environments = merge([
    for key, machine in var.machines : {
      for spot in [false, true] : "${key}${spot ? "-spot" : ""}" => {
        instance_type = local.instance_types[key]
        spot          = spot
        zone          = spot ? null : machine.multi_node_zone # Batch runs no jobs over several machines on Spot
        gpus          = local.gpus[key]
        vcpus         = data.aws_ec2_instance_type.this[key].default_vcpus
        memory_mib    = data.aws_ec2_instance_type.this[key].memory_size
        max_vcpus     = data.aws_ec2_instance_type.this[key].default_vcpus * machine.max_machines
      } if spot ? machine.spot : machine.on_demand
    }
  ]...)
  zones            = sort(data.aws_availability_zones.all.names)
  multi_node_zones = toset([for environment in values(local.environments) : environment.zone if environment.zone != null])
  account          = "${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}"
  arn              = "arn:${data.aws_partition.current.partition}"
}

# ---- Network: nothing from outside comes in. Public subnets, so that no NAT gateway is paid for

resource "aws_vpc" "this" {
  cidr_block           = "10.0.0.0/16"
  enable_dns_hostnames = true

  tags = { Name = var.name }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id

  tags = { Name = var.name }
}

resource "aws_route_table" "this" {
  vpc_id = aws_vpc.this.id

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.this.id
  }

  tags = { Name = var.name }
}

resource "aws_subnet" "this" { # in every zone: not all have every GPU
  for_each = toset(local.zones)

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.value
  cidr_block              = cidrsubnet(aws_vpc.this.cidr_block, 5, index(local.zones, each.value))
  map_public_ip_on_launch = true

  tags = { Name = "${var.name}-${each.value}" }
}

resource "aws_route_table_association" "this" {
  for_each = aws_subnet.this

  subnet_id      = each.value.id
  route_table_id = aws_route_table.this.id
}

# The containers of a job over several machines have network interfaces of their own, which Batch gives no public
# address: W&B is behind a NAT gateway for them.
# https://docs.aws.amazon.com/batch/latest/userguide/mnp-ce.html

resource "aws_subnet" "multi_node" {
  for_each = local.multi_node_zones

  vpc_id            = aws_vpc.this.id
  availability_zone = each.value
  cidr_block        = cidrsubnet(aws_vpc.this.cidr_block, 5, 16 + index(local.zones, each.value))

  tags = { Name = "${var.name}-${each.value}-multi-node" }
}

resource "aws_eip" "nat" {
  for_each = local.multi_node_zones

  tags = { Name = "${var.name}-${each.value}" }
}

resource "aws_nat_gateway" "this" {
  for_each = local.multi_node_zones

  allocation_id = aws_eip.nat[each.value].id
  subnet_id     = aws_subnet.this[each.value].id

  tags = { Name = "${var.name}-${each.value}" }

  depends_on = [aws_internet_gateway.this]
}

resource "aws_route_table" "multi_node" {
  for_each = local.multi_node_zones

  vpc_id = aws_vpc.this.id

  route {
    cidr_block     = "0.0.0.0/0"
    nat_gateway_id = aws_nat_gateway.this[each.value].id
  }

  tags = { Name = "${var.name}-${each.value}-multi-node" }
}

resource "aws_route_table_association" "multi_node" {
  for_each = local.multi_node_zones

  subnet_id      = aws_subnet.multi_node[each.value].id
  route_table_id = aws_route_table.multi_node[each.value].id
}

resource "aws_vpc_endpoint" "s3" { # free, and checkpoints do not pay for the NAT gateway
  vpc_id          = aws_vpc.this.id
  service_name    = "com.amazonaws.${data.aws_region.current.name}.s3"
  route_table_ids = concat([aws_route_table.this.id], [for table in aws_route_table.multi_node : table.id])

  tags = { Name = var.name }
}

resource "aws_security_group" "this" {
  name_prefix = "${var.name}-"
  description = "Machines of ${var.name}: free among themselves, for jobs over several of them"
  vpc_id      = aws_vpc.this.id

  ingress {
    description = "torchrun, gloo and NCCL use ports of their choice"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    self        = true
  }

  egress {
    description = "images, S3, CloudWatch, W&B"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    cidr_blocks = ["0.0.0.0/0"]
  }

  lifecycle {
    create_before_destroy = true
  }
}

# ---- Machines, and the queues in front of them

resource "aws_placement_group" "this" {
  for_each = { for key, environment in local.environments : key => environment if environment.zone != null }

  name     = "${var.name}-${each.key}"
  strategy = "cluster"
}

resource "aws_launch_template" "this" {
  for_each = local.environments

  name_prefix = "${var.name}-${each.key}-"

  block_device_mappings {
    device_name = "/dev/xvda" # the root of Batch's own machine images

    ebs {
      volume_size           = var.volume_gib
      volume_type           = "gp3"
      encrypted             = "true"
      delete_on_termination = "true"
    }
  }

  metadata_options {
    http_endpoint = "enabled"
    http_tokens   = "required"
  }

  dynamic "placement" {
    for_each = each.value.zone != null ? [aws_placement_group.this[each.key].name] : []

    content {
      group_name = placement.value
    }
  }
}

resource "aws_batch_compute_environment" "this" {
  for_each = local.environments

  compute_environment_name_prefix = "${var.name}-${each.key}-"
  type                            = "MANAGED"
  service_role                    = aws_iam_role.batch.arn

  compute_resources {
    type                = each.value.spot ? "SPOT" : "EC2"
    allocation_strategy = each.value.spot ? "SPOT_CAPACITY_OPTIMIZED" : "BEST_FIT_PROGRESSIVE"
    bid_percentage      = each.value.spot ? var.spot_max_price : null
    instance_type       = [each.value.instance_type]
    min_vcpus           = 0
    max_vcpus           = each.value.max_vcpus
    instance_role       = aws_iam_instance_profile.machine.arn
    subnets             = each.value.zone != null ? [aws_subnet.multi_node[each.value.zone].id] : [for subnet in aws_subnet.this : subnet.id]
    security_group_ids  = [aws_security_group.this.id]
    tags                = { Name = "${var.name}-${each.key}", Project = var.name } # on each machine, to find its costs

    launch_template {
      launch_template_id = aws_launch_template.this[each.key].id
      version            = aws_launch_template.this[each.key].latest_version
    }
  }

  lifecycle { # a queue moves to the new one before the old one goes
    create_before_destroy = true
    ignore_changes        = [compute_resources[0].desired_vcpus] # Batch's own business
  }

  depends_on = [aws_iam_role_policy_attachment.batch] # without its role Batch could not delete the machines
}

resource "aws_batch_job_queue" "this" {
  for_each = local.environments

  name                 = "${var.name}-${each.key}"
  state                = "ENABLED"
  priority             = 1
  compute_environments = [aws_batch_compute_environment.this[each.key].arn]
}

# ---- Storage, logs, the W&B key

resource "aws_s3_bucket" "checkpoints" {
  bucket_prefix = "${var.name}-checkpoints-"
  force_destroy = var.force_destroy
}

resource "aws_s3_bucket_public_access_block" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_cloudwatch_log_group" "jobs" {
  name              = "/${var.name}/jobs"
  retention_in_days = var.log_days
}

resource "aws_secretsmanager_secret" "wandb" { # its value is put there by hand, and never in Terraform's state
  name_prefix = "${var.name}-wandb-"
  description = "W&B key of the jobs of ${var.name}"
}

# ---- Roles: each may do what its part needs

data "aws_iam_policy_document" "assume" {
  for_each = {
    batch     = "batch.amazonaws.com"
    machine   = "ec2.amazonaws.com"
    container = "ecs-tasks.amazonaws.com"
  }

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = [each.value]
    }
  }
}

resource "aws_iam_role" "batch" { # Batch itself: starts and stops machines
  name_prefix        = "${var.name}-batch-"
  assume_role_policy = data.aws_iam_policy_document.assume["batch"].json
}

resource "aws_iam_role_policy_attachment" "batch" {
  role       = aws_iam_role.batch.name
  policy_arn = "${local.arn}:iam::aws:policy/service-role/AWSBatchServiceRole"
}

resource "aws_iam_role" "machine" { # the ECS agent of a machine: takes containers to run
  name_prefix        = "${var.name}-machine-"
  assume_role_policy = data.aws_iam_policy_document.assume["machine"].json
}

resource "aws_iam_role_policy_attachment" "machine" {
  role       = aws_iam_role.machine.name
  policy_arn = "${local.arn}:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_instance_profile" "machine" {
  name_prefix = "${var.name}-machine-"
  role        = aws_iam_role.machine.name
}

resource "aws_iam_role" "execution" { # what happens before and around a container: image, secret, log
  name_prefix        = "${var.name}-execution-"
  assume_role_policy = data.aws_iam_policy_document.assume["container"].json
}

data "aws_iam_policy_document" "execution" {
  statement {
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [aws_secretsmanager_secret.wandb.arn]
  }

  statement {
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${aws_cloudwatch_log_group.jobs.arn}:*"]
  }

  statement {
    actions   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    resources = ["${local.arn}:ecr:${local.account}:repository/*"]
  }

  statement {
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"] # it has no resource
  }
}

resource "aws_iam_role_policy" "execution" {
  name   = "execution"
  role   = aws_iam_role.execution.id
  policy = data.aws_iam_policy_document.execution.json
}

resource "aws_iam_role" "job" { # the script itself
  name_prefix        = "${var.name}-job-"
  assume_role_policy = data.aws_iam_policy_document.assume["container"].json
}

data "aws_iam_policy_document" "job" {
  statement {
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.checkpoints.arn]
  }

  statement {
    actions   = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    resources = ["${aws_s3_bucket.checkpoints.arn}/*"]
  }
}

resource "aws_iam_role_policy" "job" {
  name   = "job"
  role   = aws_iam_role.job.id
  policy = data.aws_iam_policy_document.job.json
}

data "aws_iam_policy_document" "submit" {
  statement {
    actions = ["batch:SubmitJob"]
    resources = concat(
      [for queue in aws_batch_job_queue.this : queue.arn],
      ["${local.arn}:batch:${local.account}:job-definition/*"],
    )
  }

  statement {
    actions   = ["batch:DeregisterJobDefinition", "batch:RegisterJobDefinition"]
    resources = ["${local.arn}:batch:${local.account}:job-definition/*"]
  }

  statement {
    actions   = ["batch:CancelJob", "batch:TerminateJob"]
    resources = ["${local.arn}:batch:${local.account}:job/*"]
  }

  statement {
    actions   = ["batch:Describe*", "batch:ListJobs"]
    resources = ["*"] # they have no resource
  }

  statement {
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.execution.arn, aws_iam_role.job.arn]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ecs-tasks.amazonaws.com"]
    }
  }

  statement {
    actions   = ["logs:GetLogEvents"]
    resources = ["${aws_cloudwatch_log_group.jobs.arn}:*"]
  }
}

resource "aws_iam_policy" "submit" { # for people
  name_prefix = "${var.name}-submit-"
  description = "Submit, follow and end jobs of ${var.name}"
  policy      = data.aws_iam_policy_document.submit.json
}
