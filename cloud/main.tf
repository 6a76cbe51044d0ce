# AWS Batch for the training scripts: cloud/README.md has the set-up, the costs and the clean-up.

terraform {
  required_version = ">= 1.3" # optional() in object types; `terraform test` of this folder needs 1.7

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 3.39, < 6.0" # the spellings that these share: `compute_environment_name_prefix`, `compute_environments`
    }
  }
}

provider "aws" {
  region = var.region
}

module "cleanrl" {
  source = "./modules/cleanrl"

  name           = var.name
  machines       = var.machines
  volume_gib     = var.volume_gib
  force_destroy  = var.force_destroy
  log_days       = var.log_days
  spot_max_price = var.spot_max_price
}
