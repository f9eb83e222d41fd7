//! The `spillway` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    spillway::cli::run(std::env::args_os())
}
