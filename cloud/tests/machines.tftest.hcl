# What the variables become, with AWS mocked: `terraform init && terraform test` in the folder above.

mock_provider "aws" {
  mock_data "aws_ec2_instance_type" {
    defaults = {
      default_vcpus = 48
      memory_size   = 196608
    }
  }

  mock_data "aws_availability_zones" {
    defaults = { names = ["us-east-1a", "us-east-1b"] }
  }

  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }

  mock_data "aws_region" {
    defaults = { name = "us-east-1" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_resource "aws_batch_compute_environment" {
    defaults = { arn = "arn:aws:batch:us-east-1:123456789012:compute-environment/mocked" }
  }

  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/mocked" }
  }

  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/mocked" }
  }

  mock_resource "aws_vpc" {
    defaults = { id = "vpc-1" }
  }
}

run "gpu_type_and_count_choose_the_machine" {
  module {
    source = "./modules/cleanrl"
  }

  variables {
    machines = {
      four = { gpu_type = "T4", gpu_count = 4, max_machines = 3, multi_node_zone = "us-east-1b" }
      cpus = { instance_type = "c7i.4xlarge", spot = false }
    }
  }

  assert {
    condition     = keys(output.job_queues) == ["cleanrl-cpus", "cleanrl-four", "cleanrl-four-spot"]
    error_message = "one queue on demand and one on Spot, unless switched off: ${join(" ", keys(output.job_queues))}"
  }

  assert {
    condition     = output.job_queues["cleanrl-four-spot"] == { machine = "g4dn.12xlarge", spot = true, gpus = 4, vcpus = 48, memory_mib = 176947 }
    error_message = "sizes are of one machine: ${jsonencode(output.job_queues)}"
  }

  assert {
    condition = (
      aws_batch_compute_environment.this["four"].compute_resources[0].type == "EC2" &&
      aws_batch_compute_environment.this["four"].compute_resources[0].max_vcpus == 144 &&
      aws_batch_compute_environment.this["four"].compute_resources[0].bid_percentage == null
    )
    error_message = "on demand: three machines of 48 vCPUs"
  }

  assert {
    condition = (
      aws_batch_compute_environment.this["four-spot"].compute_resources[0].type == "SPOT" &&
      aws_batch_compute_environment.this["four-spot"].compute_resources[0].min_vcpus == 0 &&
      aws_batch_compute_environment.this["four-spot"].compute_resources[0].bid_percentage == 100
    )
    error_message = "Spot, down to no machine at all"
  }

  assert {
    condition = (
      keys(aws_placement_group.this) == ["four"] &&
      aws_launch_template.this["four"].placement[0].group_name == "cleanrl-four" &&
      aws_batch_compute_environment.this["four"].compute_resources[0].subnets == toset([aws_subnet.multi_node["us-east-1b"].id]) &&
      keys(aws_nat_gateway.this) == ["us-east-1b"]
    )
    error_message = "jobs over several machines: close together, behind a NAT gateway"
  }

  assert {
    condition = (
      length(aws_launch_template.this["four-spot"].placement) == 0 &&
      aws_batch_compute_environment.this["four-spot"].compute_resources[0].subnets == toset([for subnet in aws_subnet.this : subnet.id])
    )
    error_message = "all others: in any zone"
  }

  assert {
    condition     = length(distinct(concat([for subnet in aws_subnet.this : subnet.cidr_block], [for subnet in aws_subnet.multi_node : subnet.cidr_block]))) == 3
    error_message = "subnets do not overlap"
  }

  assert {
    condition     = alltrue([for rule in aws_security_group.this.ingress : rule.self && length(coalesce(rule.cidr_blocks, [])) == 0])
    error_message = "nothing from outside"
  }
}

run "defaults" {
  assert {
    condition     = output.job_queues["cleanrl-t4-spot"].machine == "g4dn.xlarge" && length(output.job_queues) == 2
    error_message = "a T4 on demand and on Spot"
  }

  assert {
    condition     = startswith(output.checkpoint_url, "s3://") && output.log_group == "/cleanrl/jobs"
    error_message = "what submit_exp reads"
  }
}

run "no_such_machine" {
  command = plan

  module {
    source = "./modules/cleanrl"
  }

  variables {
    machines = { a100 = { gpu_type = "A100", gpu_count = 2 } }
  }

  expect_failures = [var.machines]
}

run "a_name_that_is_another_queue" {
  command = plan

  module {
    source = "./modules/cleanrl"
  }

  variables {
    machines = { t4-spot = { gpu_type = "T4" } }
  }

  expect_failures = [var.machines]
}

run "a_machine_without_a_queue" {
  command = plan

  module {
    source = "./modules/cleanrl"
  }

  variables {
    machines = { t4 = { gpu_type = "T4", on_demand = false, spot = false } }
  }

  expect_failures = [var.machines]
}

run "a_name_that_no_bucket_can_have" {
  command = plan

  module {
    source = "./modules/cleanrl"
  }

  variables {
    name = "CleanRL_2"
  }

  expect_failures = [var.name]
}

run "a_disk_without_room_for_the_image" {
  command = plan

  module {
    source = "./modules/cleanrl"
  }

  variables {
    volume_gib = 8
  }

  expect_failures = [var.volume_gib]
}
