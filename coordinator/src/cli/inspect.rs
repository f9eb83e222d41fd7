//! `inspect`: what a model file holds. The file passes every check of a load first.

use super::args::InspectArgs;
use super::failure::Failure;
use super::output;
use crate::open::{TextNeed, open_model_with};
use crate::planner::bytes;
use serde::Serialize;
use serde_json::{Map, Value, json};
use spillway_model::gguf::{TensorInfo, Value as MetaValue};
use spillway_model::inspect::{Mixer, Part, Summary};

/// Longest array of the metadata that is shown whole; vocabularies are much longer.
const WHOLE_ARRAY: usize = 64;

/// Characters of a string in the listing for people.
const SHOWN_CHARS: usize = 60;

/// Everything that is shown.
#[derive(Debug, Serialize)]
struct Report {
    file: String,
    #[serde(flatten)]
    summary: Summary,
    metadata: Map<String, Value>,
    tensors: Vec<Tensor>,
}

/// One tensor.
#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    format: String,
    /// The contiguous dimension first.
    shape: Vec<u64>,
    bytes: u64,
    /// From the start of the file.
    offset: usize,
}

/// Prints the report.
pub fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    let model = open_model_with(&args.file, TextNeed::Optional, &args.tokenizer.options())?;
    let gguf = model.file().gguf();
    let report = Report {
        file: args.file.display().to_string(),
        summary: model.file().summary(),
        metadata: gguf.metadata().iter().map(|(key, value)| (key.to_owned(), meta_json(&value))).collect(),
        tensors: gguf.tensors().iter().map(tensor).collect(),
    };
    if args.json { output::json(&report) } else { output::text(&listing(&report)) }
}

fn tensor(info: &TensorInfo) -> Tensor {
    Tensor {
        name: info.name.to_string(),
        format: info.ggml_type.to_string(),
        shape: info.dims.clone(),
        bytes: info.size(),
        offset: info.range.start,
    }
}

/// A metadata value; a long array is replaced by its type and length.
fn meta_json(value: &MetaValue<'_>) -> Value {
    match value {
        MetaValue::Str(text) => json!(text),
        MetaValue::Bool(on) => json!(on),
        // The shortest decimal of the f32, not the digits of its widening.
        MetaValue::F32(number) => json!(number.to_string().parse::<f64>().ok()),
        MetaValue::F64(number) => json!(number),
        MetaValue::I8(number) => json!(number),
        MetaValue::I16(number) => json!(number),
        MetaValue::I32(number) => json!(number),
        MetaValue::I64(number) => json!(number),
        MetaValue::U8(number) => json!(number),
        MetaValue::U16(number) => json!(number),
        MetaValue::U32(number) => json!(number),
        MetaValue::U64(number) => json!(number),
        MetaValue::Array(array) if array.len() <= WHOLE_ARRAY => {
            array.iter().map(|item| item.as_ref().map_or(Value::Null, meta_json)).collect()
        }
        MetaValue::Array(array) => json!({"array_of": array.elem_type().name(), "length": array.len()}),
    }
}

fn listing(report: &Report) -> String {
    let Report { file, summary, .. } = report;
    let mut lines = vec![
        format!("{}: GGUF v{}, {}", plain(file), summary.gguf_version, bytes(summary.file_bytes)),
        format!(
            "  {}: {} layers, width {}, vocabulary {}, context {}, {:.1} M parameters",
            summary.architecture,
            summary.layers.len(),
            summary.d_model,
            summary.vocab,
            summary.context_length,
            summary.used.elements as f64 / 1e6
        ),
    ];
    lines.extend(summary.notes.iter().map(|note| format!("  note: {}", plain(note))));
    lines.push("\nparts".to_owned());
    lines.push(part_line("embedding", "", &summary.embedding));
    for layer in &summary.layers {
        let mixer = match layer.mixer {
            Mixer::Attention => "attention",
            Mixer::Recurrent => "recurrent",
        };
        lines.push(part_line(&format!("layer {}", layer.layer), mixer, &layer.part));
    }
    lines.push(part_line("head", if summary.tied { "tied" } else { "" }, &summary.head));
    lines.push(part_line("all used", "", &summary.used));
    lines.push(part_line("not used", "", &summary.unused));
    lines.push("\nmetadata".to_owned());
    lines.extend(
        report
            .metadata
            .iter()
            .map(|(key, value)| format!("  {} = {}", plain(key), plain(&value.to_string()))),
    );
    lines.push("\ntensors".to_owned());
    lines.extend(report.tensors.iter().map(tensor_line));
    lines.push(String::new());
    lines.join("\n")
}

fn part_line(name: &str, kind: &str, part: &Part) -> String {
    let formats: Vec<String> = part
        .formats
        .iter()
        .map(|share| format!("{} x {} {}", share.tensors, share.format, bytes(share.bytes)))
        .collect();
    format!("  {name:<10} {kind:<10} {:>10}  {}", bytes(part.bytes), formats.join(", ")).trim_end().to_owned()
}

fn tensor_line(tensor: &Tensor) -> String {
    let shape: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
    let Tensor { name, format, bytes: size, .. } = tensor;
    format!("  {:<36} {format:<8} {:>16}  {:>10}", plain(name), shape.join("x"), bytes(*size))
}

/// Text from a file as part of a line: no control characters (a terminal would obey them), not too long.
fn plain(text: &str) -> String {
    let mut shown: String =
        text.chars().take(SHOWN_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(SHOWN_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_says_cannot_steer_the_terminal() {
        assert_eq!(plain("a\x1b[2Jb\n"), "a [2Jb ");
        assert_eq!(plain(&"x".repeat(100)).chars().count(), SHOWN_CHARS + 1);
    }
}
