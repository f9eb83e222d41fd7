use super::args::BenchArgs;
use super::failure::Failure;
pub fn bench(_args: &BenchArgs) -> Result<(), Failure> {
    Ok(())
}
