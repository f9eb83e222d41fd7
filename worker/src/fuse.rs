//! Fusion: which neighbouring steps of a layer run as one operation. Decided once, at load, by a table.
//!
//! Fusing never changes a bit of the result: a group computes every matrix exactly as it would alone, and adding a
//! product to the residual rounds once, as the separate addition does.

use spillway_model::program::{Buf, RESIDUAL, Step, WeightRef};

/// Most matrices of one group. Bounds what the executor keeps on its stack.
pub const MAX_GROUP: usize = 8;

/// One operation of a layer as it will run.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the fields are named after those of the steps")]
pub enum Fused<'a> {
    /// Matrices that read the same input: it is prepared once, and one fork and join computes them all.
    Project { src: Buf, parts: Vec<Projection<'a>> },
    /// Gated MLP: gate and up in one group, then down.
    Mlp { src: Buf, gate: &'a WeightRef, up: &'a WeightRef, down: &'a WeightRef, into: Target },
    /// A step as it is.
    Single(&'a Step),
}

/// One matrix of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct Projection<'a> {
    /// The matrix.
    pub weight: &'a WeightRef,
    /// Added to the product.
    pub bias: Option<&'a WeightRef>,
    /// Where the product goes.
    pub into: Target,
}

/// Where a product goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Replaces the buffer.
    Store(Buf),
    /// Is added to the residual stream.
    AddToResidual,
}

/// One way to absorb a step into the operation before it.
struct Rule {
    /// For reports and tests.
    name: &'static str,
    /// Extends `last` by `step` if that keeps the meaning; `later` are the steps of the layer after `step`.
    absorb: for<'a> fn(last: &mut Fused<'a>, step: &'a Step, later: &[Step]) -> bool,
}

/// The table. docs/worker-cpu.md gives the reasons and the limits.
const RULES: [Rule; 3] = [
    Rule { name: "matrices with a common input", absorb: common_input },
    Rule { name: "projection into the residual", absorb: projection_into_residual },
    Rule { name: "gated MLP into the residual", absorb: mlp_into_residual },
];

/// The operations of a layer, in order.
pub fn fuse(steps: &[Step]) -> Vec<Fused<'_>> {
    let mut fused: Vec<Fused<'_>> = Vec::with_capacity(steps.len());
    for (index, step) in steps.iter().enumerate() {
        let later = &steps[index + 1..];
        let rule =
            fused.last_mut().and_then(|last| RULES.iter().find(|rule| (rule.absorb)(last, step, later)));
        match rule {
            Some(rule) => tracing::trace!(rule = rule.name, ?step, "fused"),
            None => fused.push(start(step)),
        }
    }
    fused
}

/// A step as an operation of its own.
pub fn start(step: &Step) -> Fused<'_> {
    match step {
        Step::Linear { src, dst, weight, bias } => {
            let part = Projection { weight, bias: bias.as_ref(), into: Target::Store(*dst) };
            Fused::Project { src: *src, parts: vec![part] }
        }
        Step::GatedMlp { src, dst, gate, up, down } => {
            Fused::Mlp { src: *src, gate, up, down, into: Target::Store(*dst) }
        }
        _ => Fused::Single(step),
    }
}

fn common_input<'a>(last: &mut Fused<'a>, step: &'a Step, _later: &[Step]) -> bool {
    let (Fused::Project { src, parts }, Step::Linear { src: input, dst, weight, bias }) = (last, step) else {
        return false;
    };
    let writes = |buf: Buf| parts.iter().any(|part| part.into == Target::Store(buf));
    // The input must still be what the group reads, and no two products may share a buffer.
    let fits =
        src == input && parts.len() < MAX_GROUP && parts.iter().all(|part| part.weight.cols == weight.cols);
    if !fits || writes(*src) || writes(*dst) {
        return false;
    }
    parts.push(Projection { weight, bias: bias.as_ref(), into: Target::Store(*dst) });
    true
}

fn projection_into_residual<'a>(last: &mut Fused<'a>, step: &'a Step, later: &[Step]) -> bool {
    match last {
        Fused::Project { src, parts } if *src != RESIDUAL => match parts.as_mut_slice() {
            [only] => redirect(&mut only.into, step, later),
            _ => false,
        },
        _ => false,
    }
}

fn mlp_into_residual<'a>(last: &mut Fused<'a>, step: &'a Step, later: &[Step]) -> bool {
    match last {
        Fused::Mlp { src, into, .. } if *src != RESIDUAL => redirect(into, step, later),
        _ => false,
    }
}

/// Turns a product that is only added to the residual into one that adds itself.
fn redirect(into: &mut Target, step: &Step, later: &[Step]) -> bool {
    let (Target::Store(dst), Step::Residual { src }) = (*into, step) else { return false };
    let used = later.iter().any(|step| reads(step).contains(&Some(dst)));
    if dst != *src || dst == RESIDUAL || used {
        return false;
    }
    *into = Target::AddToResidual;
    true
}

/// Buffers that a step reads, those it changes in place included.
pub fn reads(step: &Step) -> [Option<Buf>; 4] {
    match step {
        Step::Norm { src, .. }
        | Step::Linear { src, .. }
        | Step::SplitHeads { src, .. }
        | Step::GatedMlp { src, .. }
        | Step::Residual { src } => [Some(*src), None, None, None],
        Step::HeadNorm { buf, .. } | Step::Rope { buf, .. } => [Some(*buf), None, None, None],
        Step::Attention { q, k, v, gate, .. } => [Some(*q), Some(*k), Some(*v), *gate],
        Step::DeltaNet { qkv, gate, alpha, beta, .. } => [Some(*qkv), Some(*gate), Some(*alpha), Some(*beta)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(name: &str) -> WeightRef {
        WeightRef { name: name.into(), rows: 8, cols: 8 }
    }

    fn linear(src: u16, dst: u16) -> Step {
        Step::Linear { src: Buf(src), dst: Buf(dst), weight: weight("w"), bias: None }
    }

    fn residual(src: u16) -> Step {
        Step::Residual { src: Buf(src) }
    }

    fn mlp(src: u16, dst: u16) -> Step {
        let (gate, up, down) = (weight("g"), weight("u"), weight("d"));
        Step::GatedMlp { src: Buf(src), dst: Buf(dst), gate, up, down }
    }

    /// Where each operation writes, by group.
    fn targets(steps: &[Step]) -> Vec<Vec<Target>> {
        let of = |fused: Fused<'_>| match fused {
            Fused::Project { parts, .. } => parts.iter().map(|part| part.into).collect(),
            Fused::Mlp { into, .. } => vec![into],
            Fused::Single(_) => vec![],
        };
        fuse(steps).into_iter().map(of).collect()
    }

    fn store(buf: u16) -> Target {
        Target::Store(Buf(buf))
    }

    #[test]
    fn neighbours_with_a_common_input_form_a_group() {
        let steps = [linear(1, 2), linear(1, 3), linear(1, 4), linear(2, 5)];
        assert_eq!(targets(&steps), [vec![store(2), store(3), store(4)], vec![store(5)]]);
    }

    #[test]
    fn a_group_ends_where_a_buffer_would_be_written_twice_or_read_after_a_write() {
        assert_eq!(targets(&[linear(1, 2), linear(1, 2)]), [[store(2)], [store(2)]]);
        assert_eq!(targets(&[linear(1, 1), linear(1, 2)]), [[store(1)], [store(2)]]);
        let many: Vec<Step> = (2..).take(MAX_GROUP + 1).map(|dst| linear(1, dst)).collect();
        assert_eq!(targets(&many).len(), 2);
    }

    #[test]
    fn a_product_that_is_only_added_adds_itself() {
        assert_eq!(targets(&[linear(1, 2), residual(2)]), [[Target::AddToResidual]]);
        assert_eq!(targets(&[mlp(1, 2), residual(2)]), [[Target::AddToResidual]]);
    }

    #[test]
    fn a_product_with_another_use_is_stored() {
        assert_eq!(
            targets(&[linear(1, 2), residual(2), linear(2, 3)]),
            [vec![store(2)], vec![], vec![store(3)]]
        );
        assert_eq!(targets(&[mlp(1, 2), residual(2), residual(2)]), [vec![store(2)], vec![], vec![]]);
        assert_eq!(targets(&[linear(1, 2), linear(1, 3), residual(3)]), [vec![store(2), store(3)], vec![]]);
        assert_eq!(targets(&[linear(1, 2), residual(3)]), [vec![store(2)], vec![]]);
        // A product of the residual itself must not change its own input.
        assert_eq!(targets(&[linear(0, 2), residual(2)]), [vec![store(2)], vec![]]);
    }
}
