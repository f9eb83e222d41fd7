//! `tokenize` and `detokenize`: text to token ids and back.

use super::args::{DetokenizeArgs, TokenizeArgs};
use super::failure::Failure;
use super::input;
use super::output;
use crate::open::{TextNeed, open_model_with};
use crate::prompt;
use spillway_model::tokenizer::{ControlText, EncodeOptions};

/// Prints the ids of the text on standard input.
pub fn tokenize(args: &TokenizeArgs) -> Result<(), Failure> {
    let model = open_model_with(&args.model.model, TextNeed::Required, &args.model.tokenizer.options())?;
    let options = EncodeOptions { add_special: !args.no_bos, parse_special: args.parse_special };
    output::json(&prompt::tokenizer(&model)?.encode(&input::text()?, options))
}

/// Writes the text of the ids on standard input, byte for byte.
pub fn detokenize(args: &DetokenizeArgs) -> Result<(), Failure> {
    let model = open_model_with(&args.model.model, TextNeed::Required, &args.model.tokenizer.options())?;
    let text = input::text()?;
    let ids: Vec<u32> = serde_json::from_str(&text)
        .map_err(|error| Failure::BadInput(format!("it is not a JSON array of token ids ({error})")))?;
    output::bytes(&prompt::tokenizer(&model)?.decode(&ids, ControlText::Show)?)
}
