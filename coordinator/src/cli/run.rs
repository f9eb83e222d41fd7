//! `run`: answer one prompt.

use super::args::RunArgs;
use super::failure::Failure;
use super::generation::{Answer, Piece, generate};
use super::input;
use super::interrupt::Interrupts;
use super::output;
use super::session::Prepared;
use crate::config::Config;
use crate::engine::{Completion, GenerateRequest};
use crate::open::TextNeed;
use crate::prompt::{self, ChatPrompt};
use crate::sampler::draw_seed;
use serde_json::{Value, json};
use std::io::{IsTerminal, stdin};

/// Answers the prompt.
pub fn run(args: &RunArgs, config: &Config) -> Result<(), Failure> {
    let text = prompt_text(args)?;
    let interrupts = Interrupts::install()?;
    let prepared = Prepared::new(
        &args.model,
        TextNeed::Required,
        args.saved.or(args.placement.to_single_request(config)),
        config,
    )?;
    let prompt = prompt_ids(args, &prepared, &text)?;
    let generation = config.generation();
    let sampling = args.sampling.to_params(&generation, draw_seed());
    let seed = sampling.seed;
    let mut request = GenerateRequest {
        prompt,
        max_tokens: args.sampling.max_tokens(&generation),
        sampling,
        stop: args.sampling.stop.clone(),
        ignore_eos: args.sampling.ignore_eos,
    };
    // What will be refused is refused before anything is loaded.
    request.check(&prepared.plan, prepared.model.tokenizer().map(AsRef::as_ref))?;
    let session = prepared.start(&interrupts, &args.progress)?;
    let answer = generate(&session.engine, &interrupts, request, |piece| show(&piece, args.json))?;
    let (completion, cancelled) = match answer {
        Answer::Complete(completion) => (completion, false),
        Answer::Cancelled(completion) => (completion, true),
    };
    if args.json {
        output::json(&done(&completion, seed))?;
    } else if !completion.text.ends_with('\n') {
        output::text("\n")?;
    }
    if cancelled { Err(Failure::Interrupted) } else { Ok(()) }
}

fn show(piece: &Piece, as_json: bool) -> Result<(), Failure> {
    if as_json {
        output::json(&json!({"type": "token", "token": piece.token, "text": piece.text}))
    } else {
        output::text(&piece.text)
    }
}

/// The last line of `--json`.
fn done(completion: &Completion, seed: u64) -> Value {
    let timings = &completion.timings;
    json!({
        "type": "done",
        "text": completion.text,
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason.as_str(),
        "seed": seed,
        "timings": {
            "prompt_tokens": timings.prompt_tokens,
            "cached_tokens": timings.cached_tokens,
            "prefill_ms": timings.prefill_ms,
            "prefill_tok_s": timings.prefill_tok_s(),
            "generated_tokens": timings.generated_tokens,
            "decode_ms": timings.decode_ms,
            "decode_tok_s": timings.decode_tok_s(),
            "ttft_ms": timings.ttft_ms,
        },
    })
}

/// The prompt from wherever it was given.
fn prompt_text(args: &RunArgs) -> Result<String, Failure> {
    if let Some(text) = args.text.as_ref().or(args.prompt.as_ref()) {
        return Ok(text.clone());
    }
    if stdin().is_terminal() {
        let usage = "there is no prompt; give it with -p, as an argument, or on standard input";
        return Err(Failure::Usage(usage.to_owned()));
    }
    input::line()
}

fn prompt_ids(args: &RunArgs, prepared: &Prepared, text: &str) -> Result<Vec<u32>, Failure> {
    let Prepared { model, plan, .. } = prepared;
    let max_seq = plan.limits.max_seq;
    if args.raw {
        return Ok(prompt::raw(model, text, max_seq)?);
    }
    let mut messages: Vec<Value> = args.template.system_message().into_iter().collect();
    messages.push(json!({"role": "user", "content": text}));
    let chat = ChatPrompt {
        messages: &messages,
        tools: None,
        enable_thinking: args.template.enable_thinking,
        kwargs: &args.template.kwargs(),
    };
    Ok(prompt::chat(model, &chat, max_seq)?)
}
