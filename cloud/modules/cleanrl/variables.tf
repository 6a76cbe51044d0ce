variable "name" {
  description = "First part of every name; a second installation in one account needs another one."
  type        = string
  default     = "cleanrl"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,19}$", var.name))
    error_message = "The name must be 1 to 20 lower-case letters, digits and hyphens, and begin with a letter: buckets and roles are named after it."
  }
}

variable "machines" {
  description = <<-EOT
    Kinds of machine by a short name; `t4` makes the queues `{name}-t4` (on-demand) and `{name}-t4-spot`.
      gpu_type         T4, A10G, L4, L40S, A100 or H100; left out, the machine has none and needs an instance_type
      gpu_count        GPUs of each machine
      instance_type    a type instead of the smallest one with these GPUs. The games run on the CPU: the 4 vCPUs of
                       the smallest with one GPU step them slowly
      max_machines     the most that run at once in each of the two queues
      on_demand, spot  which of the two queues are made
      multi_node_zone  availability zone, such as us-east-1a, in which the on-demand queue also runs jobs over several
                       machines: close together, behind a NAT gateway that costs some 33 dollars a month
  EOT
  type = map(object({
    gpu_type        = optional(string)
    gpu_count       = optional(number, 1)
    instance_type   = optional(string)
    max_machines    = optional(number, 4)
    on_demand       = optional(bool, true)
    spot            = optional(bool, true)
    multi_node_zone = optional(string)
  }))
  default = {
    t4 = { gpu_type = "T4" }
  }

  validation {
    condition     = alltrue([for key in keys(var.machines) : can(regex("^[a-z][a-z0-9-]{0,19}$", key)) && !can(regex("-spot$", key))])
    error_message = "A machine's short name must be 1 to 20 lower-case letters, digits and hyphens, begin with a letter and not end with -spot."
  }

  validation {
    condition = alltrue([
      for machine in values(var.machines) : machine.instance_type != null || contains([
        "T4 x1", "T4 x4", "T4 x8", "A10G x1", "A10G x4", "A10G x8", "L4 x1", "L4 x4", "L4 x8", "L40S x1", "L40S x4",
        "L40S x8", "A100 x8", "H100 x1", "H100 x8",
      ], "${coalesce(machine.gpu_type, "none")} x${machine.gpu_count}")
    ])
    error_message = "A machine needs an instance_type, or a gpu_type and gpu_count that AWS has: T4, A10G, L4 or L40S with 1, 4 or 8, A100 with 8, H100 with 1 or 8."
  }

  validation {
    condition     = alltrue([for machine in values(var.machines) : machine.max_machines >= 1 && floor(machine.max_machines) == machine.max_machines])
    error_message = "A machine's max_machines must be a whole number, 1 or more."
  }

  validation {
    condition     = alltrue([for machine in values(var.machines) : machine.on_demand || machine.spot])
    error_message = "A machine needs on_demand, spot or both."
  }
}

variable "volume_gib" {
  description = "Disk of each machine in GiB: the system, the image with CUDA's wheels, and what running jobs write."
  type        = number
  default     = 100

  validation {
    condition     = var.volume_gib >= 50
    error_message = "The volume_gib must be 50 or more: the machine image and the container image must fit."
  }
}

variable "spot_max_price" {
  description = "The most that Spot may cost, in percent of the on-demand price. Lower waits longer and is reclaimed more often."
  type        = number
  default     = 100

  validation {
    condition     = var.spot_max_price >= 1 && var.spot_max_price <= 100
    error_message = "The spot_max_price must be 1 to 100 percent."
  }
}

variable "log_days" {
  description = "Days for which logs are kept: one of CloudWatch's steps, such as 7, 30, 90, 365; 0 is forever."
  type        = number
  default     = 30
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete the checkpoints too. Without it, destroy stops at a bucket that is not empty."
  type        = bool
  default     = false
}
