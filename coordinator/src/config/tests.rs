//! Settings: the table against itself and its documents, reading, precedence, and changes of the file.

use super::kind::{Complaint, Kind};
use super::table::{self, SETTINGS, Scope, Setting};
use super::{Config, ConfigError, ConfigFile, Source, Value, document, edit, file};
use crate::engine::DeviceLost;
use crate::planner::{DEFAULT_MAX_SEQ, DEFAULT_PARALLEL, PlacementRequest};
use proptest::prelude::*;
use spillway_protocol::jsonl::PlacementParams;
use std::collections::BTreeSet;
use std::path::Path;

/// Settings of a file with a text and of some variables.
fn config(text: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, text).unwrap();
    let variable =
        |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
    Config::read(variable, &ConfigFile::locate(Some(&path)))
}

fn placement(text: &str, variables: &[(&str, &str)], given: PlacementParams) -> PlacementRequest {
    config(text, variables).unwrap().placement(given).request
}

/// Code and message of what is wrong with a file.
fn complaint(text: &str) -> (&'static str, String) {
    let error = config(text, &[]).unwrap_err();
    (error.code(), error.to_string())
}

#[test]
fn keys_variables_flags_and_parameters_are_unique() {
    let mut variables = BTreeSet::new();
    for setting in SETTINGS {
        for name in setting.variables() {
            assert!(variables.insert(name.clone()), "{name}");
        }
    }
    for name in [|s: &Setting| s.flag, |s: &Setting| s.param, |s: &Setting| Some(s.key)] {
        let all: Vec<&str> = SETTINGS.iter().filter_map(|setting| name(setting)).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{all:?}");
    }
}

#[test]
fn defaults_are_values_that_their_settings_may_have() {
    for setting in SETTINGS {
        let Some(value) = setting.default.value() else { continue };
        assert_eq!(setting.kind.read_text(&value.to_string()), Ok(value.clone()), "{}", setting.key);
        let item = toml_edit::Item::Value(setting.kind.in_toml(&value));
        assert_eq!(setting.kind.read_item(&item), Ok(value), "{}", setting.key);
    }
    let words = |setting: &Setting| setting.default.words();
    assert!(words(&table::MAX_SEQ).contains(&DEFAULT_MAX_SEQ.to_string()));
    assert!(words(&table::PARALLEL).starts_with(&DEFAULT_PARALLEL.to_string()));
}

/// `SPILLWAY_WRITE_DOCS=1` writes the files instead, after a change of the table.
#[test]
fn the_reference_and_the_schema_are_those_of_the_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let written = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let heading = "## All settings\n";
    let page = written("configuration.md");
    let by_hand = page.split(heading).next().unwrap_or_default();
    let documents = [
        ("configuration.md", format!("{by_hand}{heading}{}", document::reference())),
        ("configuration.schema.json", format!("{:#}\n", document::schema())),
    ];
    for (name, expected) in documents {
        if std::env::var_os("SPILLWAY_WRITE_DOCS").is_some() {
            std::fs::write(folder.join(name), &expected).unwrap();
        }
        assert!(written(name) == expected, "docs/{name} is not what the table says");
    }
}

/// Each pair of neighbours: a flag or parameter, the environment, the file, the default.
#[test]
fn what_is_given_wins_over_the_environment_that_over_the_file_that_over_the_default() {
    let text = "[memory]\nmax_seq = 10\nkv_type = \"f16\"\n[hardware]\nallow_mixed_arch = true\n";
    let variables = [("SPILLWAY_MAX_SEQ", "20"), ("SPILLWAY_ALLOW_MIXED_ARCH", "0")];
    let nothing = PlacementParams::default;
    let given = PlacementParams { max_seq: Some(30), allow_mixed_arch: Some(true), ..nothing() };

    let by_default = placement("", &[], nothing());
    assert_eq!(by_default, PlacementRequest::default());
    let by_file = placement(text, &[], nothing());
    assert_eq!((by_file.max_seq, by_file.kv_type.as_deref()), (Some(10), Some("f16")));
    assert!(by_file.allow_mixed_arch);
    let by_environment = placement(text, &variables, nothing());
    assert_eq!((by_environment.max_seq, by_environment.allow_mixed_arch), (Some(20), false));
    assert_eq!(by_environment.kv_type.as_deref(), Some("f16"), "the others stay the file's");
    let by_flag = placement(text, &variables, given.clone());
    assert_eq!((by_flag.max_seq, by_flag.allow_mixed_arch), (Some(30), true));
    assert_eq!(placement(text, &[], given.clone()).max_seq, Some(30));
    assert_eq!(placement("", &[], given).max_seq, Some(30));
    let off = PlacementParams { allow_mixed_arch: Some(false), ..nothing() };
    assert!(!placement(text, &[], off).allow_mixed_arch, "what is switched off is not switched on by a file");
}

#[test]
fn what_is_given_stands_in_for_settings_that_say_the_same_in_another_way() {
    let text = "[hardware]\ndevices = \"all\"\nvram_limit = \"8GiB\"\n[memory]\ngpu_layer_budget = 8\noffload_exec = \"pcie\"\n\
                offload_prompts = \"gpu\"\n[placement]\nsplit = \"auto\"\npp = 2\ncpu_workers = 3\n";
    let with = |given| placement(text, &[], given);
    let on_cpu = with(PlacementParams { devices: Some("none".into()), ..PlacementParams::default() });
    let of_gpus = [&on_cpu.vram_limit, &on_cpu.gpu_layer_budget, &on_cpu.offload_exec, &on_cpu.split];
    assert_eq!(on_cpu.offload_prompts, None);
    assert_eq!((of_gpus, on_cpu.pp, on_cpu.cpu_workers), ([&None; 4], None, Some(3)));
    let by_stage = with(PlacementParams { pp_layers: Some("1,3".into()), ..PlacementParams::default() });
    assert_eq!((by_stage.split, by_stage.gpu_layer_budget, by_stage.cpu_workers), (None, None, None));
    let stages = "[hardware]\ndevices = 0\n[placement]\npp = 2\n";
    let none = PlacementParams { devices: Some("none".into()), ..PlacementParams::default() };
    assert_eq!(placement(stages, &[], none).pp, Some(2), "nothing else counts the CPU workers");
    let text = "[placement]\npp_layers = [1, 3]\n";
    let by_count = placement(text, &[], PlacementParams { pp: Some(3), ..PlacementParams::default() });
    assert_eq!((by_count.pp, by_count.pp_layers), (Some(3), None));
    let by = |text, pp, cpu_workers| {
        let request = placement(text, &[], PlacementParams { pp, cpu_workers, ..PlacementParams::default() });
        (request.pp, request.cpu_workers)
    };
    assert_eq!(by("[placement]\ncpu_workers = 3\n", Some(2), None), (Some(2), None));
    assert_eq!(by("[placement]\npp = 3\n", None, Some(2)), (None, Some(2)));
    let on_gpus = "[hardware]\ndevices = 0\n[placement]\npp = 1\ncpu_workers = 3\n";
    assert_eq!(by(on_gpus, Some(2), None), (Some(2), Some(3)), "stages on GPUs are other ones");
    assert_eq!(by(on_gpus, None, Some(2)), (Some(1), Some(2)));
    let kept = placement(text, &[], PlacementParams { max_seq: Some(3), ..PlacementParams::default() });
    assert_eq!(kept.pp_layers.as_deref(), Some("1,3"));
}

#[test]
fn of_several_variables_the_own_one_wins_and_all_are_told() {
    let variables = [("SPILLWAY_DEVICES", "1"), ("HIPFIRE_DEVICES", "2"), ("HIPFIRE_DEVICE", "3")];
    let told = |from: usize| {
        let config = config("[hardware]\ndevices = [4, 5]\n", &variables[from..]).unwrap();
        config.all(&table::DEVICES).map(|found| found.value.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(told(0), ["1", "2", "3", "4,5"]);
    assert_eq!(told(1)[0], "2");
    assert_eq!(told(2)[0], "3");
    let empty = config("", &[("SPILLWAY_DEVICES", "")]).unwrap();
    assert_eq!(empty.source(&table::DEVICES), Source::Default, "empty is unset");
    let peer = placement("", &[("SPILLWAY_PEER", "off")], PlacementParams::default());
    assert_eq!(peer.peer_copies.as_deref(), Some("off"), "an older name");
}

/// Every field of a placement is filled from its setting and from no other.
#[test]
fn every_setting_of_a_load_reaches_the_placement() {
    let of_placement = |setting: &&&Setting| setting.scope == Scope::Load && setting.param.is_some();
    let settings = SETTINGS.iter().filter(of_placement);
    assert_eq!(settings.clone().count(), 19);
    for setting in settings {
        let text = |word: &str| (word.to_owned(), format!("Some({word:?})"));
        let (value, shown) = match setting.kind {
            Kind::Switch => ("true".to_owned(), "true".to_owned()),
            Kind::Count { .. } => ("7".to_owned(), "Some(7)".to_owned()),
            Kind::Choice { words, .. } => text(words[words.len() - 1]),
            Kind::List { .. } if setting.key == table::SPLIT.key => text("auto"),
            _ => text("7"),
        };
        let request = placement("", &[(&setting.variable(), &value)], PlacementParams::default());
        let field = format!(" {}: {shown}", setting.param.unwrap());
        assert!(format!("{request:?}").contains(&field), "{field} is not in {request:?}");
    }
}

#[test]
fn sampling_and_supervision_follow_their_settings() {
    let text = "[generation]\ntemperature = 1\ntop_k = 40\ntop_p = 0.5\nmin_p = 0.1\nrepeat_penalty = 1.1\nrepeat_window = 9\n\
                presence_penalty = -1.5\nfrequency_penalty = 2\nmax_tokens = 3\n[supervision]\nrestart_limit = 0\n";
    let config = config(text, &[("SPILLWAY_TOP_P", "0.25")]).unwrap();
    let generation = config.generation();
    let sampling = &generation.sampling;
    assert_eq!(generation.max_tokens, 3);
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (1.0, 40, 0.25));
    assert_eq!((sampling.min_p, sampling.repeat_penalty, sampling.repeat_window), (0.1, 1.1, 9));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (-1.5, 2.0));
    assert_eq!(config.engine_options().restart_limit, Some(0));
    assert_eq!(config.engine_options().device_lost, DeviceLost::Replan);
    let config = super::Config::read(
        |name| (name == "SPILLWAY_DEVICE_LOST").then(|| "fail".into()),
        &ConfigFile::default(),
    );
    assert_eq!(config.unwrap().engine_options().device_lost, DeviceLost::Fail);
    let by_default = Config::default().generation();
    assert_eq!(
        (by_default.max_tokens, by_default.sampling.temperature, by_default.sampling.top_p),
        (512, 0.3, 0.8)
    );
}

#[test]
fn settings_of_the_program_become_variables_that_its_parts_know() {
    let text = "[diagnostics]\nlog = \"info\"\n[compute]\ngpu_graphs = false\n[memory]\nmax_seq = 5\n";
    let variables =
        [("SPILLWAY_LOG", "debug"), ("SPILLWAY_CPU_EXEC_TRACE", "yes"), ("HIPFIRE_LOCK_DIR", "/l")];
    let mut set = config(text, &variables).unwrap().variables();
    set.sort();
    let expected =
        [("SPILLWAY_CPU_EXEC_TRACE", "1"), ("SPILLWAY_GPU_GRAPHS", "0"), ("SPILLWAY_LOCK_DIR", "/l")];
    assert_eq!(set, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
}

#[test]
fn what_a_file_says_wrongly_is_told_with_its_line() {
    let table = [
        ("[memory]\n\nmax_seq = \"many\"", "config_wrong_type", ":3: memory.max_seq is `\"many\"`"),
        (
            "[memory]\nmax_seq = 0",
            "config_out_of_range",
            ":2: memory.max_seq is `0`, but must be a whole number of",
        ),
        ("[memory]\nmax_seq = -1", "config_out_of_range", "`-1`"),
        ("[memory]\nmax_seq = 4.5", "config_wrong_type", "`4.5`"),
        ("[memory.max_seq]\nx = 1", "config_wrong_type", "memory.max_seq is `a table`"),
        ("[compute]\nthreads = 5000", "config_out_of_range", "between 1 and 1024"),
        ("[hardware]\nallow_mixed_arch = \"true\"", "config_wrong_type", "true or false"),
        ("[hardware]\nvram_limit = [\"8 gibs\"]", "config_value_unusable", ":2: hardware.vram_limit"),
        ("[hardware]\nlock_dir = \"locks\"", "config_value_unusable", "absolute path"),
        ("[generation]\ntop_p = 0", "config_out_of_range", "above 0"),
        ("[generation]\ntemperature = nan", "config_out_of_range", "`nan`"),
        ("[memory]\nkv_type = \"\"", "config_value_unusable", "`auto`, `f32` or `f16`"),
        (
            "[compute]\n\nkernels = \"avx3\"",
            "config_value_unusable",
            ":3: compute.kernels is `\"avx3\"`, but must be `scalar`, `avx2`",
        ),
        ("[hardware]\nprovider = \"rocm\"", "config_value_unusable", ":2: hardware.provider"),
        ("[hardware]\nprovider = \"emulated:cards=2\"", "config_value_unusable", "with its options"),
        (
            "# a\nmemory.max_sep = 1",
            "config_unknown_key",
            ":2: there is no setting `memory.max_sep`; did you mean `memory.max_seq`?",
        ),
        ("[memroy]\nmax_seq = 1", "config_unknown_key", ":1: there is no setting `memroy`"),
        ("x = 1", "config_unknown_key", "config list"),
        ("memory = 1", "config_wrong_type", "a section: [memory]"),
        ("[memory]\nmax_seq = 1\nmax_seq = 2", "config_malformed", ":3: "),
        ("[memory]\nmax_seq = ", "config_malformed", ":2: "),
    ];
    for (text, code, part) in table {
        let (found, message) = complaint(text);
        assert_eq!(found, code, "{text:?}: {message}");
        assert!(message.contains(part) && !message.contains('\n'), "{text:?}: {message}");
    }
    let error = config("", &[("HIPFIRE_UNIFORM_VRAM_TOLERANCE_GB", "much")]).unwrap_err();
    assert!(error.to_string().contains("the variable HIPFIRE_UNIFORM_VRAM_TOLERANCE_GB"), "{error}");
}

#[test]
fn an_unknown_offload_exec_is_left_to_the_planner_which_warns() {
    let request = placement("[memory]\noffload_exec = \"gpu\"", &[], PlacementParams::default());
    assert_eq!(request.offload_exec.as_deref(), Some("gpu"));
    assert!(table::OFFLOAD_EXEC.kind.is_unknown_word(&Value::Text("gpu".into())));
}

#[test]
fn a_file_need_not_exist_unless_the_command_line_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("none.toml");
    let error = Config::read(|_| None, &ConfigFile::locate(Some(&missing))).unwrap_err();
    assert_eq!(error.code(), "config_missing");
    assert_eq!(ConfigFile::default().text().unwrap(), None);
    let error = Config::read(|_| None, &ConfigFile::locate(Some(folder.path()))).unwrap_err();
    assert_eq!(error.code(), "config_unreadable", "a folder");
    std::fs::write(&missing, b"a\n\xff").unwrap();
    let error = Config::read(|_| None, &ConfigFile::locate(Some(&missing))).unwrap_err();
    assert!(error.code() == "config_malformed" && error.to_string().contains(":2: "), "{error}");
}

const WRITTEN: &str = "# mine\n\n[hardware] # cards\n# the big one\ndevices = [\n  0, # first\n  1,\n]\n\n[memory]\nmax_seq = 4096 # enough\r\n\
                       kv_type   =   'f16'\n\n# unknown to us\n[other]\nx = { y = 1 }\n";

#[test]
fn comments_order_and_everything_else_stay() {
    let path = Path::new("c.toml");
    let value = |count| Value::Count(count);
    let changed = edit::with(path, WRITTEN, &table::MAX_SEQ, &value(7)).unwrap();
    assert_eq!(changed, WRITTEN.replace("4096", "7"));
    let added = edit::with(path, WRITTEN, &table::PARALLEL, &value(2)).unwrap();
    assert_eq!(added.replace("parallel = 2\n", ""), WRITTEN);
    let in_new_section = edit::with(path, WRITTEN, &table::PP, &value(2)).unwrap();
    assert_eq!(in_new_section, format!("{WRITTEN}\n[placement]\npp = 2\n"));
    let removed = edit::without(path, WRITTEN, "hardware.devices").unwrap().unwrap();
    assert_eq!(removed, WRITTEN.replace("devices = [\n  0, # first\n  1,\n]\n", ""));
    let inline = edit::without(path, WRITTEN, "other.x").unwrap().unwrap();
    assert_eq!(inline, WRITTEN.replace("x = { y = 1 }\n", ""));
    assert_eq!(edit::without(path, "a = {b = 1, c = 2}", "a.b").unwrap().unwrap(), "a = { c = 2}\n");
    assert_eq!(edit::without(path, "a.b = 1\na.c = 2", "a.b").unwrap().unwrap(), "a.c = 2");
    assert_eq!(edit::without(path, "[a]\n", "a").unwrap().unwrap(), "");
    let refused = edit::without(path, "[a]\nb = 1\nc = 2\n", "a").unwrap_err();
    assert!(
        refused.code() == "config_whole_section" && refused.to_string().contains("a.b, a.c"),
        "{refused}"
    );
    assert_eq!(edit::without(path, WRITTEN, "memory.parallel").unwrap(), None);
    let marked = "\u{feff}[memory]\nmax_seq = 4096\n";
    let changed = edit::with(path, marked, &table::MAX_SEQ, &value(7)).unwrap();
    assert_eq!(changed, marked.replace("4096", "7"), "a byte order mark");
    let added = edit::with(path, marked, &table::PARALLEL, &value(2)).unwrap();
    assert_eq!(added, format!("{marked}parallel = 2\n"));
    assert_eq!(edit::without(path, &added, "memory.parallel").unwrap().unwrap(), marked);
    assert_eq!(edit::without(path, "\u{feff}a.b = 1\nc = 2\n", "a.b").unwrap().unwrap(), "\u{feff}c = 2\n");
    let of_windows = "# a\r\n[memory]\r\nmax_seq = 4096\r\n\r\n[other]\r\nx = { y = 1, z = 2 }\r\n";
    let added = edit::with(path, of_windows, &table::PARALLEL, &value(2)).unwrap();
    assert_eq!(added, of_windows.replace("4096\r\n", "4096\r\nparallel = 2\r\n"));
    let with_section = edit::with(path, of_windows, &table::PP, &value(2)).unwrap();
    assert_eq!(with_section, format!("{of_windows}\r\n[placement]\r\npp = 2\r\n"));
    let unended = edit::with(path, "[memory]\r\nmax_seq = 4096", &table::PARALLEL, &value(2)).unwrap();
    assert_eq!(unended, "[memory]\r\nmax_seq = 4096\r\nparallel = 2\r\n");
    let error = edit::with(path, "\nmemory = 1", &table::MAX_SEQ, &value(7)).unwrap_err();
    assert!(error.code() == "config_wrong_type" && error.to_string().starts_with("c.toml:2: "), "{error}");
}

/// Any setting with a value that it may have.
fn assignment() -> impl Strategy<Value = (&'static Setting, String)> {
    (0..SETTINGS.len(), any::<u64>(), "[ -~]{1,12}").prop_filter_map(
        "not a value",
        |(index, number, text)| {
            let setting = SETTINGS[index];
            let candidates = match setting.kind {
                Kind::Switch => vec![(number % 2 == 0).to_string()],
                Kind::Choice { words, .. } => {
                    vec![words[usize::try_from(number).unwrap_or(0) % words.len()].to_owned()]
                }
                Kind::Folder => vec![format!("/{text}")],
                _ => vec![
                    text.clone(),
                    (number % 512).to_string(),
                    format!("0.{number}"),
                    format!("{number}KB,3B"),
                ],
            };
            let typed = candidates.into_iter().find(|typed| setting.kind.read_text(typed).is_ok())?;
            Some((setting, typed))
        },
    )
}

proptest! {
    /// What is set is got, everything else is as it was, and what is unset is gone.
    #[test]
    fn set_and_get_agree_and_nothing_else_changes(steps in proptest::collection::vec(assignment(), 1..12)) {
        let path = Path::new("c.toml");
        let mut text = WRITTEN.split("# unknown").next().unwrap().replace('\r', "");
        for (setting, typed) in steps {
            let value = setting.kind.read_text(&typed).unwrap();
            let before = file::read(path, &text).unwrap();
            let changed = edit::with(path, &text, setting, &value).unwrap();
            let after = file::read(path, &changed).unwrap();
            let values = |all: &[(&'static Setting, Value, Source)], of: &Setting, own: bool| -> Vec<(String, String)> {
                let wanted = all.iter().filter(|(setting, ..)| (setting.key == of.key) == own);
                wanted.map(|(setting, value, _)| (setting.key.to_owned(), value.to_string())).collect()
            };
            prop_assert_eq!(values(&after, setting, true), vec![(setting.key.to_owned(), value.to_string())]);
            let mut others = [values(&before, setting, false), values(&after, setting, false)];
            others.iter_mut().for_each(|all| all.sort());
            prop_assert_eq!(&others[0], &others[1]);
            for line in text.lines().filter(|line| line.starts_with(['#', '['])).chain(["# enough"]) {
                prop_assert!(changed.contains(line), "{} is gone from\n{}", line, changed);
            }
            let without = edit::without(path, &changed, setting.key).unwrap().unwrap();
            prop_assert!(values(&file::read(path, &without).unwrap(), setting, true).is_empty());
            text = changed;
        }
    }
}

#[test]
fn complaints_tell_types_from_ranges() {
    let read = |setting: &Setting, text: &str| setting.kind.read_text(text);
    assert_eq!(read(&table::PP, "0"), Err(Complaint::OutOfRange));
    assert_eq!(read(&table::PP, "two"), Err(Complaint::WrongType));
    assert_eq!(read(&table::PP_LAYERS, "1,0"), Err(Complaint::Unreadable));
    assert_eq!(
        read(&table::MAX_SEQ, &u64::MAX.to_string()),
        Err(Complaint::OutOfRange),
        "no file could hold it"
    );
    assert_eq!(read(&table::ALLOW_MIXED_ARCH, "On"), Ok(Value::Bool(true)));
    assert_eq!(read(&table::LOG, "spillway=loud"), Err(Complaint::Unreadable));
}
