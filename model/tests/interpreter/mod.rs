//! Runs a program one token at a time in the plainest way: what each step means, without any kernel.

use spillway_model::file::ModelFile;
use spillway_model::gguf::GgmlType;
use spillway_model::program::{
    AttentionSpec, Buf, DeltaNetSpec, Layer, Program, RESIDUAL, RopePairing, RopeSpec, Step, WeightRef,
};
use std::collections::HashMap;

/// A program, its weights as f32, and one sequence's state.
pub struct Interpreter {
    program: Program,
    weights: HashMap<String, Vec<f32>>,
    states: Vec<State>,
    position: usize,
}

/// What a layer remembers of the sequence.
#[derive(Default)]
struct State {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    /// Past inputs of the convolution, oldest first.
    inputs: Vec<Vec<f32>>,
    /// Per value head `[value][key]`.
    matrices: Vec<f32>,
}

/// Residual stream after the mixer, after the MLP's output was added, of every layer; and the logits.
pub struct Trace {
    pub layers: Vec<Vec<f32>>,
    pub logits: Vec<f32>,
}

impl Interpreter {
    pub fn new(file: &ModelFile) -> Self {
        let program = file.program().clone();
        let weights = program.weights().map(|w| (w.name.clone(), decode(file, w))).collect();
        let states = program.layers.iter().map(|_| State::default()).collect();
        Interpreter { program, weights, states, position: 0 }
    }

    /// Feeds one token.
    pub fn step(&mut self, token: usize) -> Trace {
        let d_model = self.program.d_model;
        let mut residual = self.weights[&self.program.embed.name][token * d_model..][..d_model].to_vec();
        let mut layers = Vec::new();
        for (layer, state) in self.program.layers.iter().zip(&mut self.states) {
            let ropes = &self.program.ropes;
            residual = run_layer(layer, residual, ropes, &self.weights, self.position, state);
            layers.push(residual.clone());
        }
        self.position += 1;
        let head = &self.program.head;
        let normed = rms_norm(&residual, &self.weights[&head.norm.name], head.eps);
        Trace { layers, logits: multiply(&self.weights[&head.output.name], &normed) }
    }
}

fn decode(file: &ModelFile, weight: &WeightRef) -> Vec<f32> {
    let data = file.weight(weight).unwrap();
    match data.info.ggml_type {
        GgmlType::F32 => data.bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        GgmlType::BF16 => {
            let halves = data.bytes.as_chunks::<2>().0.iter();
            halves.map(|&b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)).collect()
        }
        other => panic!("the interpreter does not decode {other}"),
    }
}

/// Sums in lanes, which the compiler turns into vector instructions: the tests feed thousands of tokens.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// `matrix · x`, where the matrix has rows as long as `x`.
fn multiply(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    matrix.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

fn run_layer(
    layer: &Layer,
    residual: Vec<f32>,
    ropes: &[RopeSpec],
    weights: &HashMap<String, Vec<f32>>,
    position: usize,
    state: &mut State,
) -> Vec<f32> {
    let mut buffers: Vec<Vec<f32>> = layer.buffers.iter().map(|&width| vec![f32::NAN; width]).collect();
    buffers[0] = residual;
    let get = |buffers: &[Vec<f32>], buf: Buf| buffers[usize::from(buf.0)].clone();
    let of = |weight: &WeightRef| &weights[&weight.name];
    for step in &layer.steps {
        let (dst, result) = match step {
            Step::Norm { src, dst, weight, eps } => (*dst, rms_norm(&get(&buffers, *src), of(weight), *eps)),
            Step::Linear { src, dst, weight, bias } => {
                let mut y = multiply(of(weight), &get(&buffers, *src));
                if let Some(bias) = bias {
                    y.iter_mut().zip(of(bias)).for_each(|(y, b)| *y += b);
                }
                (*dst, y)
            }
            Step::HeadNorm { buf, head_dim, weight, eps } => {
                let x = get(&buffers, *buf);
                (*buf, x.chunks_exact(*head_dim).flat_map(|head| rms_norm(head, of(weight), *eps)).collect())
            }
            Step::SplitHeads { src, first, second, head_dim } => {
                let x = get(&buffers, *src);
                let half = |part: usize| {
                    x.chunks_exact(*head_dim).skip(part).step_by(2).flatten().copied().collect()
                };
                buffers[usize::from(first.0)] = half(0);
                (*second, half(1))
            }
            Step::Rope { buf, head_dim, rope } => {
                let mut x = get(&buffers, *buf);
                x.chunks_exact_mut(*head_dim).for_each(|head| rotate(head, &ropes[*rope], position));
                (*buf, x)
            }
            Step::Attention { q, k, v, gate, dst, spec } => {
                state.keys.push(get(&buffers, *k));
                state.values.push(get(&buffers, *v));
                let mut y = attend(&get(&buffers, *q), state, spec);
                if let Some(gate) = gate {
                    y.iter_mut().zip(get(&buffers, *gate)).for_each(|(y, g)| *y *= sigmoid(g));
                }
                (*dst, y)
            }
            Step::DeltaNet { qkv, gate, alpha, beta, dst, spec } => {
                let [qkv, gate, alpha, beta] = [qkv, gate, alpha, beta].map(|&buf| get(&buffers, buf));
                let conv = convolve(qkv, of(&spec.conv), spec, state);
                (
                    *dst,
                    delta_rule(
                        &conv,
                        &gate,
                        &alpha,
                        &beta,
                        spec,
                        [&spec.decay, &spec.dt_bias, &spec.norm].map(of),
                        state,
                    ),
                )
            }
            Step::GatedMlp { src, dst, gate, up, down } => {
                let x = get(&buffers, *src);
                let up = multiply(of(up), &x);
                let hidden: Vec<f32> =
                    multiply(of(gate), &x).iter().zip(up).map(|(g, u)| silu(*g) * u).collect();
                (*dst, multiply(of(down), &hidden))
            }
            Step::Residual { src } => {
                let sum =
                    get(&buffers, RESIDUAL).iter().zip(get(&buffers, *src)).map(|(r, x)| r + x).collect();
                (RESIDUAL, sum)
            }
        };
        assert_eq!(result.len(), layer.buffers[usize::from(dst.0)], "{step:?} fills its buffer");
        buffers[usize::from(dst.0)] = result;
    }
    buffers.swap_remove(0)
}

fn rotate(head: &mut [f32], rope: &RopeSpec, position: usize) {
    for (i, freq) in rope.inv_freq.iter().enumerate() {
        let (a, b) = match rope.pairing {
            RopePairing::Halves => (i, i + rope.rotary_dim / 2),
            RopePairing::Adjacent => (2 * i, 2 * i + 1),
        };
        let (sin, cos) = (position as f32 * freq).sin_cos();
        let (x, y) = (head[a], head[b]);
        head[a] = (x * cos - y * sin) * rope.magnitude;
        head[b] = (y * cos + x * sin) * rope.magnitude;
    }
}

fn attend(q: &[f32], state: &State, spec: &AttentionSpec) -> Vec<f32> {
    let mut out = Vec::new();
    for (head, q) in q.chunks_exact(spec.key_dim).enumerate() {
        let kv = head / (spec.heads / spec.kv_heads);
        let scores = state.keys.iter().map(|k| dot(q, &k[kv * spec.key_dim..][..spec.key_dim]) * spec.scale);
        let scores: Vec<f32> = scores.collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| (s - largest).exp()).collect();
        let total: f32 = weights.iter().sum();
        out.extend((0..spec.value_dim).map(|i| {
            let values = state.values.iter().map(|v| v[kv * spec.value_dim + i]);
            values.zip(&weights).map(|(v, w)| v * w).sum::<f32>() / total
        }));
    }
    out
}

fn convolve(input: Vec<f32>, taps: &[f32], spec: &DeltaNetSpec, state: &mut State) -> Vec<f32> {
    let past = spec.conv_kernel - 1;
    if state.inputs.is_empty() {
        state.inputs = vec![vec![0.0; input.len()]; past];
    }
    state.inputs.push(input);
    let channels = taps.chunks_exact(spec.conv_kernel).enumerate();
    let out =
        channels.map(|(c, taps)| silu(taps.iter().zip(&state.inputs).map(|(w, x)| w * x[c]).sum())).collect();
    state.inputs.remove(0);
    out
}

fn delta_rule(
    conv: &[f32],
    gate: &[f32],
    alpha: &[f32],
    beta: &[f32],
    spec: &DeltaNetSpec,
    [decay, dt_bias, norm]: [&Vec<f32>; 3],
    state: &mut State,
) -> Vec<f32> {
    let d = spec.head_dim;
    let (queries, rest) = conv.split_at(spec.key_heads * d);
    let (keys, values) = rest.split_at(spec.key_heads * d);
    let unit = |x: &[f32]| {
        let scale = 1.0 / (dot(x, x) + spec.eps).sqrt();
        x.iter().map(|x| x * scale).collect::<Vec<f32>>()
    };
    state.matrices.resize(spec.value_heads * d * d, 0.0);
    let mut out = Vec::new();
    for j in 0..spec.value_heads {
        let head = (j % spec.key_heads) * d;
        let (q, k) = (unit(&queries[head..head + d]), unit(&keys[head..head + d]));
        let step = (1.0 + (alpha[j] + dt_bias[j]).exp()).ln();
        let keep = (decay[j] * step).exp();
        let write = sigmoid(beta[j]);
        let matrix = &mut state.matrices[j * d * d..][..d * d];
        let mut y = Vec::new();
        for (row, v) in matrix.chunks_exact_mut(d).zip(&values[j * d..]) {
            row.iter_mut().for_each(|s| *s *= keep);
            let delta = write * (v - dot(row, &k));
            row.iter_mut().zip(&k).for_each(|(s, k)| *s += delta * k);
            y.push(dot(row, &q) / (d as f32).sqrt());
        }
        let normed = rms_norm(&y, norm, spec.eps);
        out.extend(normed.iter().zip(&gate[j * d..]).map(|(y, g)| y * silu(*g)));
    }
    out
}
