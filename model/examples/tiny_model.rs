//! Writes a tiny runnable model, for scripts: `tiny_model ARCHITECTURE FILE [LAYERS]`.

use spillway_model::testing::TinyModel;
use std::path::Path;
use std::process::ExitCode;

const ARCHITECTURES: [&str; 4] = ["llama", "qwen2", "qwen3", "qwen35"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match write(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::from(2)
        }
    }
}

fn write(arguments: &[String]) -> Result<(), String> {
    let (architecture, file, layers) = match arguments {
        [architecture, file] => (architecture, file, 4),
        [architecture, file, layers] => (architecture, file, layers.parse().map_err(|_| usage())?),
        _ => return Err(usage()),
    };
    let architecture = ARCHITECTURES.into_iter().find(|known| known == architecture).ok_or_else(usage)?;
    let model = TinyModel::new(architecture).layers(layers);
    model.write(Path::new(file)).map_err(|error| format!("{file} cannot be written: {error}"))
}

fn usage() -> String {
    format!("usage: tiny_model {} FILE [LAYERS]", ARCHITECTURES.join("|"))
}
