# modules/cleanrl/variables.tf explains each of them and holds the rules.

variable "region" {
  description = "AWS region of everything here."
  type        = string
  default     = "us-east-1"
}

variable "name" {
  description = "First part of every name."
  type        = string
  default     = "cleanrl"
}

variable "machines" {
  description = "Kinds of machine by a short name, each with its GPU type, GPU count and limits."
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
}

variable "volume_gib" {
  description = "Disk of each machine in GiB."
  type        = number
  default     = 100
}

variable "spot_max_price" {
  description = "The most that Spot may cost, in percent of the on-demand price."
  type        = number
  default     = 100
}

variable "log_days" {
  description = "Days for which logs are kept."
  type        = number
  default     = 30
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete the checkpoints too."
  type        = bool
  default     = false
}
