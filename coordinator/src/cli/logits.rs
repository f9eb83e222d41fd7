//! `logits`: what the model thinks of given token ids, position by position. The tool that parity checks use.

use super::args::LogitsArgs;
use super::failure::Failure;
use super::interrupt::Interrupts;
use super::output;
use super::session::Prepared;
use crate::config::Config;
use crate::engine::ScoreRequest;
use crate::open::TextNeed;
use crate::placement::Placement;
use serde::Serialize;
use std::ops::ControlFlow;

/// What is printed of one position.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    pos: usize,
    /// The token at this position; the logits are about the next one.
    token: u32,
    argmax: u32,
    /// Ids and logits, largest first; of equal logits the lower id comes first.
    top: Vec<(u32, f32)>,
    mean: f64,
    /// Standard deviation over the vocabulary (the whole population).
    std: f64,
}

/// Prints a row per position.
pub fn logits(args: &LogitsArgs, config: &Config) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let prepared = Prepared::new(&args.model, TextNeed::Ignored, placement(args, config), config)?;
    let request = ScoreRequest { ids: args.ids.clone(), chunk: None };
    // What will be refused is refused before anything is loaded.
    request.check(&prepared.plan)?;
    let session = prepared.start(&interrupts, &args.progress)?;
    let engine = session.engine.clone();
    let (top, as_json) = (args.top, args.json);
    let scored = interrupts.interruptible(move || {
        let mut printed = Ok(());
        engine.score(&request, &mut |pos, logits| {
            let row = row(pos, request.ids[pos], logits, top);
            printed = if as_json { output::json(&row) } else { output::text(&sentence(&row)) };
            if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        printed
    })?;
    scored.unwrap_or_else(|| {
        session.abandon();
        Err(Failure::Interrupted)
    })
}

/// One sequence, just as long as the ids unless the user chose otherwise.
fn placement(args: &LogitsArgs, config: &Config) -> Placement {
    let mut asked = args.placement.to_single_request(config);
    asked.request.max_seq.get_or_insert(args.ids.len());
    args.saved.or(asked)
}

fn sentence(row: &Row) -> String {
    let top: Vec<String> = row.top.iter().map(|(id, logit)| format!("{id}:{logit:.4}")).collect();
    let Row { pos, token, argmax, mean, std, .. } = row;
    format!(
        "{pos:>6}  token {token:>6}  argmax {argmax:>6}  mean {mean:.4}  std {std:.4}  {}\n",
        top.join(" ")
    )
}

fn row(pos: usize, token: u32, logits: &[f32], top: usize) -> Row {
    let count = logits.len().max(1) as f64;
    let mean = logits.iter().map(|&logit| f64::from(logit)).sum::<f64>() / count;
    let variance = logits.iter().map(|&logit| (f64::from(logit) - mean).powi(2)).sum::<f64>() / count;
    let best = largest(logits, top.max(1));
    Row {
        pos,
        token,
        argmax: best.first().map_or(0, |&(id, _)| id),
        top: best[..top.min(best.len())].to_vec(),
        mean,
        std: variance.sqrt(),
    }
}

/// The `count` largest logits in order; fewer if there are not so many.
fn largest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count < all.len() {
        all.select_nth_unstable_by(count, order);
        all.truncate(count);
    }
    all.sort_unstable_by(order);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_are_in_the_order_of_their_ids() {
        let logits = [1.0, 3.0, 3.0, -1.0];
        assert_eq!(largest(&logits, 3), [(1, 3.0), (2, 3.0), (0, 1.0)]);
        assert_eq!(largest(&logits, 9).len(), 4);
    }

    #[test]
    fn a_row_has_mean_and_deviation_of_the_whole_vocabulary() {
        let expected =
            Row { pos: 7, token: 2, argmax: 1, top: vec![(1, 4.0)], mean: 1.0, std: 2.0f64.sqrt() * 1.5 };
        let row = row(7, 2, &[0.0, 4.0, 2.0, -2.0], 1);
        assert_eq!(Row { std: 0.0, ..row }, Row { std: 0.0, ..expected });
        assert!((super::row(0, 0, &[1.0, 3.0], 0).std - 1.0).abs() < 1e-12);
        assert_eq!(super::row(0, 0, &[1.0, 3.0], 0).top, []);
    }
}
