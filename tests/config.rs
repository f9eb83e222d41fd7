//! Settings through the real program: `config`, what commands and the daemon make of a file and of variables, and refusals.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use support::{Daemon, Models, Ran, finish, spillway};

/// A folder with a configuration file.
struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    fn new(text: &str) -> Self {
        let home = Home { folder: tempfile::tempdir().unwrap() };
        home.write(text);
        home
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("config.toml")
    }

    fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path()).unwrap()
    }

    /// Runs a command with the file and some variables.
    fn run_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Ran {
        let mut command = spillway(args);
        command.env("SPILLWAY_CONFIG", self.path()).envs(variables.iter().copied());
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(command.spawn().unwrap(), b"")
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, &[])
    }

    fn json(&self, args: &[&str]) -> Value {
        let ran = self.run(args);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{args:?}");
        ran.json()
    }

    /// A line of the file, as messages name it.
    fn at(&self, line: usize) -> String {
        format!("{}:{line}", self.path().display())
    }
}

fn assert_refused(ran: &Ran, code: &str, parts: &[&str]) {
    assert_eq!(ran.code, Some(3), "{ran:?}");
    let error = ran.json();
    assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!(code)), "{error}");
    for part in parts {
        assert!(error["message"].as_str().unwrap().contains(part), "{part}: {error}");
    }
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_setting_is_set_shown_explained_and_unset() {
    let home = Home::new("# mine\n[memory] # of cards\nmax_seq = 64 # short\n");
    assert_eq!(home.run(&["config", "path"]).stdout, format!("{}\n", home.path().display()));
    assert_eq!(home.run(&["config", "get", "memory.max_seq"]).stdout, "64\n");
    let set = home.run(&["config", "set", "memory.max_seq", "128"]);
    assert_eq!((set.code, set.stdout.as_str(), set.stderr.as_str()), (Some(0), "", ""));
    assert_eq!(home.run(&["config", "set", "hardware.devices", "0,1"]).code, Some(0));
    assert_eq!(home.run(&["config", "set", "generation.presence_penalty", "-1.5"]).code, Some(0));
    assert_eq!(
        home.text(),
        "# mine\n[memory] # of cards\nmax_seq = 128 # short\n\n[hardware]\ndevices = \"0,1\"\n\n[generation]\npresence_penalty = -1.5\n"
    );
    let explained = home.run_with(&["config", "explain", "memory.max_seq"], &[("SPILLWAY_MAX_SEQ", "256")]);
    let expected = [
        "Longest sequence",
        "256",
        "SPILLWAY_MAX_SEQ",
        "--max-seq",
        "at least 1",
        "at most 4096",
        "128 of",
        &home.at(3),
    ];
    for part in expected {
        assert!(explained.stdout.contains(part), "{part}: {}", explained.stdout);
    }
    let unset = home.run(&["config", "unset", "memory.max_seq"]);
    assert_eq!((unset.code, unset.stderr.as_str()), (Some(0), ""));
    assert!(home.text().starts_with("# mine\n[memory] # of cards\n\n[hardware]"), "{}", home.text());
    assert_eq!(
        home.run(&["config", "get", "memory.max_seq"]).stdout,
        "(the model's context, at most 4096)\n"
    );
    let again = home.run(&["config", "unset", "memory.max_seq"]);
    assert!(again.code == Some(0) && again.stderr.contains("was not set"), "{again:?}");
}

#[test]
fn json_tells_values_sources_and_what_they_override() {
    let home = Home::new("[memory]\nmax_seq = 64\n[hardware]\nallow_mixed_arch = true\n");
    let variables = [("SPILLWAY_MAX_SEQ", "256"), ("HIPFIRE_ALLOW_MIXED_ARCH", "0")];
    let ran = home.run_with(&["config", "get", "memory.max_seq", "--json"], &variables);
    let found = ran.json();
    assert_eq!((&found["value"], &found["type"]), (&json!(256), &json!("integer")));
    assert_eq!(found["source"], json!({"kind": "environment", "name": "SPILLWAY_MAX_SEQ"}));
    let in_file = json!({"kind": "file", "path": home.path(), "line": 2});
    assert_eq!(found["overrides"], json!([{"value": 64, "source": in_file}]));
    let listed = home.run_with(&["config", "list", "--json"], &variables).json();
    assert_eq!(listed["file"], json!(home.path()));
    let settings = listed["settings"].as_array().unwrap();
    let row = |key: &str| settings.iter().find(|row| row["key"] == key).unwrap();
    assert_eq!(row("memory.max_seq"), &found);
    assert_eq!(row("hardware.allow_mixed_arch")["value"], json!(false));
    assert_eq!(row("memory.kv_type")["source"], json!({"kind": "default"}));
    assert_eq!(row("placement.pp")["value"], Value::Null);
    let shown = home.run_with(&["config", "list"], &variables).stdout;
    assert_eq!(shown.lines().count(), settings.len());
    let schema = home.run(&["config", "schema"]).stdout;
    assert!(serde_json::from_str::<Value>(&schema).unwrap()["properties"]["memory"].is_object());
}

#[test]
fn values_that_are_obviously_wrong_are_not_written() {
    let home = Home::new("# untouched\n");
    let wrong = [
        ("memory.max_seq", "0", "at least 1"),
        ("memory.max_seq", "lots", "whole number"),
        ("memory.kv_type", "fp8", "`auto`, `f32` or `f16`"),
        ("memory.offload_exec", "gpu", "`pcie` or `cpu`"),
        ("memory.gpu_layer_budget", "most", "`auto`"),
        ("hardware.vram_limit", "8GiB,large", "sizes"),
        ("hardware.devices", "0,,1", "device numbers"),
        ("hardware.lock_dir", "locks", "absolute path"),
        ("hardware.allow_mixed_arch", "maybe", "true or false"),
        ("placement.split", "bytes:", "`uniform`"),
        ("placement.pp_layers", "12,0", "at least 1"),
        ("generation.top_p", "1.5", "at most 1"),
        ("memory.max_sep", "1", "did you mean `memory.max_seq`?"),
    ];
    for (key, value, part) in wrong {
        let ran = home.run(&["config", "set", key, value]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), ""), "{key} {value}: {ran:?}");
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(part), "{key} {value}: {ran:?}");
        assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
    }
    assert_eq!(home.text(), "# untouched\n");
    let unknown = home.run(&["config", "get", "memory.max_sep", "--json"]);
    assert_refused(&unknown, "config_unknown_key", &["memory.max_seq"]);
}

#[test]
fn a_file_is_made_where_there_is_none_and_keeps_its_mode_and_its_link() {
    let home = Home::new("");
    let inner = home.folder.path().join("a/b/config.toml");
    let ran =
        home.run_with(&["config", "set", "memory.kv_type", "f16"], &[("SPILLWAY_CONFIG", text(&inner))]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(fs::read_to_string(&inner).unwrap(), "[memory]\nkv_type = \"f16\"\n");
    fs::set_permissions(&inner, fs::Permissions::from_mode(0o640)).unwrap();
    let link = home.folder.path().join("link.toml");
    std::os::unix::fs::symlink(&inner, &link).unwrap();
    assert_eq!(home.run(&["--config", text(&link), "config", "set", "placement.pp", "2"]).code, Some(0));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read_to_string(&inner).unwrap().contains("pp = 2"));
    assert_eq!(fs::metadata(&inner).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(fs::read_dir(inner.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
    let device = home.run(&["config", "set", "placement.pp", "2", "--config", "/dev/null"]);
    assert!(device.code == Some(1) && device.stderr.contains("no regular file"), "{device:?}");
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
}

/// Whoever comes second reads what the first has written.
#[test]
fn changes_at_the_same_time_are_all_kept() {
    let home = Home::new("");
    let settings = [
        ("memory.max_seq", "64"),
        ("memory.parallel", "2"),
        ("memory.kv_type", "f16"),
        ("placement.pp", "2"),
        ("compute.threads", "3"),
        ("compute.chunk", "16"),
        ("generation.top_k", "5"),
        ("generation.max_tokens", "6"),
        ("supervision.restart_limit", "7"),
        ("hardware.peer_copies", "off"),
    ];
    let start = |(key, value): (&str, &str)| {
        spillway(["config", "set", key, value]).env("SPILLWAY_CONFIG", home.path()).spawn().unwrap()
    };
    for round in 0..3 {
        home.write("");
        let children: Vec<_> = settings.into_iter().map(start).collect();
        children.into_iter().for_each(|mut child| assert!(child.wait().unwrap().success()));
        let file = home.text();
        for (key, value) in settings {
            let line = file.lines().find(|line| line.starts_with(key.rsplit_once('.').unwrap().1));
            assert!(line.is_some_and(|line| line.contains(value)), "{round} {key}: {file}");
        }
    }
}

/// A program that never ends does not hold up a change for ever, and the file stays.
#[test]
fn a_folder_that_stays_locked_is_told() {
    let home = Home::new("# mine\n");
    let folder = fs::File::open(home.folder.path()).unwrap();
    folder.lock().unwrap();
    let ran = home.run(&["config", "set", "placement.pp", "2"]);
    assert!(ran.code == Some(1) && ran.stderr.contains("kept its folder locked"), "{ran:?}");
    assert_eq!(home.text(), "# mine\n");
    folder.unlock().unwrap();
    assert_eq!(home.run(&["config", "set", "placement.pp", "2"]).code, Some(0));
}

#[test]
fn a_link_to_a_file_that_is_not_there_yet_stays_a_link() {
    let home = Home::new("");
    let (link, inner) = (home.folder.path().join("link.toml"), home.folder.path().join("a/b.toml"));
    std::os::unix::fs::symlink("a/b.toml", &link).unwrap();
    let ran = home.run_with(&["config", "set", "placement.pp", "2"], &[("SPILLWAY_CONFIG", text(&link))]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read_to_string(&inner).unwrap(), "[placement]\npp = 2\n");
    let circle = home.folder.path().join("circle.toml");
    std::os::unix::fs::symlink("circle.toml", &circle).unwrap();
    let ran = home.run_with(&["config", "set", "placement.pp", "2"], &[("SPILLWAY_CONFIG", text(&circle))]);
    assert!(ran.code == Some(1) && ran.stderr.contains("leads to itself"), "{ran:?}");
}

#[test]
fn a_section_is_not_unset_as_if_it_were_a_setting() {
    let home = Home::new("[memory]\nmax_seq = 64\nparallel = 2\n");
    let ran = home.run(&["config", "unset", "memory"]);
    assert!(ran.code == Some(3) && ran.stderr.contains("memory.max_seq, memory.parallel"), "{ran:?}");
    assert_eq!(home.text(), "[memory]\nmax_seq = 64\nparallel = 2\n");
}

/// Stages, context and KV type of a plan.
fn planned(plan: &Value) -> (usize, &Value, &Value) {
    (plan["stages"].as_array().unwrap().len(), &plan["limits"]["max_seq"], &plan["limits"]["kv_type"])
}

#[test]
fn commands_follow_flags_then_variables_then_the_file() {
    let models = Models::new();
    let model = models.tiny();
    let home = Home::new("[memory]\nmax_seq = 96\n[placement]\ncpu_workers = 2\n");
    let plan = home.json(&["plan", "-m", text(&model), "--json"]);
    assert_eq!((planned(&plan).0, planned(&plan).1), (2, &json!(96)));
    let plan = home.run_with(&["plan", "-m", text(&model), "--json"], &[("SPILLWAY_MAX_SEQ", "80")]).json();
    assert_eq!((planned(&plan).0, planned(&plan).1), (2, &json!(80)));
    let args = ["plan", "-m", text(&model), "--json", "--max-seq", "48", "--cpu-workers", "1"];
    let plan = home.run_with(&args, &[("SPILLWAY_MAX_SEQ", "80")]).json();
    assert_eq!((planned(&plan).0, planned(&plan).1), (1, &json!(48)));
    // Another file by flag, before and after the command.
    let other = Home::new("[memory]\nmax_seq = 32\n");
    for args in [
        ["--config", text(&other.path()), "plan", "-m", text(&model), "--json"],
        ["plan", "--config", text(&other.path()), "-m", text(&model), "--json"],
    ] {
        assert_eq!(planned(&home.json(&args)).1, &json!(32), "{args:?}");
    }
    // Commands that load.
    let logits = home.run(&["logits", "-m", text(&model), "--ids", "1,2", "--json", "-q"]);
    assert_eq!((logits.code, logits.json_lines().len()), (Some(0), 2), "{logits:?}");
    home.write("[generation]\nmax_tokens = 3\ntemperature = 0\n");
    let args = ["run", "-m", text(&model), "-p", "the word", "--ignore-eos", "--json", "-q"];
    let answer = |ran: Ran| ran.json_lines().last().unwrap()["token_ids"].as_array().unwrap().len();
    assert_eq!(answer(home.run(&args)), 3);
    assert_eq!(answer(home.run_with(&args, &[("SPILLWAY_MAX_TOKENS", "2")])), 2);
    assert_eq!(answer(home.run(&[&args[..], &["-n", "1"]].concat())), 1);
    home.write("[memory]\nmax_seq = 2\n");
    let short = home.run(&["bench", "-m", text(&model), "-p", "8", "-n", "0", "--json", "-q"]);
    assert_eq!(short.json()["code"], "context_length_exceeded", "{short:?}");
}

#[test]
fn devices_of_the_file_are_planned_with_and_seen_only_once() {
    let models = Models::new();
    let home =
        Home::new("[hardware]\ndevices = \"emulated:devices=2,memory=8GiB\"\nprovider = \"emulated\"\n");
    let plan = home.json(&["plan", "-m", text(&models.tiny()), "--json"]);
    let provider = &plan["stages"][1]["execution"]["gpu"]["device"]["provider"];
    assert!(provider.as_str().is_some_and(|name| name.starts_with("emulated")), "{plan}");
    let devices = home.json(&["devices", "--json"]);
    assert_eq!(
        devices["devices"][0]["provider"].as_str().map(|name| name.starts_with("emulated")),
        Some(true)
    );
    // The search is another process of this program: its settings are those of the one that started it.
    let broken = Home::new("memory = [");
    let (settings, model) = (home.path(), models.tiny());
    let searched = broken.run(&["--config", text(&settings), "plan", "-m", text(&model), "--json"]);
    assert_eq!(searched.code, Some(0), "{searched:?}");
    assert_eq!(searched.json(), plan);
}

/// Who has forgotten what the file says finds it in the refusal.
#[test]
fn a_refused_placement_names_the_settings_that_took_part() {
    let models = Models::new();
    let home =
        Home::new("[hardware]\ndevices = \"emulated:devices=1\"\n[placement]\npp = 2\nsplit = \"auto\"\n");
    let model = models.tiny();
    let plan = |more: &[&str]| {
        let args = [&["plan", "--json", "-m", text(&model)], more].concat();
        home.run_with(&args, &[("SPILLWAY_MAX_SEQ", "64")])
    };
    let parts = format!(
        "settings in use: hardware.devices ({}), placement.pp ({}), placement.split ({}), memory.max_seq (SPILLWAY_MAX_SEQ)",
        home.at(2),
        home.at(4),
        home.at(5)
    );
    assert_refused(&plan(&[]), "pp_beyond_devices", &[&parts]);
    let by_flags =
        plan(&["--pp", "3", "--split", "uniform", "--devices", "emulated:devices=1", "--max-seq", "32"]);
    assert_eq!(
        (by_flags.code, by_flags.stderr.contains("settings in use")),
        (Some(3), false),
        "{by_flags:?}"
    );
}

#[test]
fn a_file_that_cannot_be_used_refuses_commands_before_they_do_anything() {
    let models = Models::new();
    let model = models.tiny();
    let home = Home::new("[memory]\nmax_seq = 64\n\n[memroy]\nkv_type = \"f16\"\n");
    let saved = home.folder.path().join("plan.json");
    let plan = ["plan", "-m", text(&model), "--json", "--save", text(&saved)];
    assert_refused(&home.run(&plan), "config_unknown_key", &[&home.at(4), "memroy"]);
    assert!(!saved.exists());
    let run = ["run", "-m", "no such file", "-p", "x", "--json"];
    assert_refused(&home.run(&run), "config_unknown_key", &[&home.at(4)]);
    assert_eq!(home.run(&["daemon"]).code, Some(3));
    // What shows and repairs settings works all the same, and what has none.
    assert_eq!(home.run(&["config", "path"]).code, Some(0));
    assert_eq!(home.run(&["completions", "bash"]).code, Some(0));
    assert_eq!(home.run(&["config", "unset", "memroy.kv_type"]).code, Some(0));
    assert_eq!(home.run(&["config", "unset", "memroy"]).code, Some(0));
    assert_eq!(home.run(&plan).code, Some(0));
    home.write("memory = [");
    assert_refused(&home.run(&plan), "config_malformed", &[&home.at(1)]);
    let set = home.run(&["config", "set", "memory.max_seq", "1"]);
    assert!(set.code == Some(3) && home.text() == "memory = [", "{set:?}");
    home.write("");
    assert_refused(
        &home.run_with(&plan, &[("SPILLWAY_PP", "two")]),
        "config_wrong_type",
        &["SPILLWAY_PP", "placement.pp"],
    );
    let missing = home.run(&["plan", "-m", text(&model), "--json", "--config", "/nowhere/c.toml"]);
    assert_refused(&missing, "config_missing", &["/nowhere/c.toml"]);
}

/// The words of a choice stand in two places, here and in the planner.
#[test]
fn every_word_of_a_choice_is_one_that_the_planner_knows() {
    let models = Models::new();
    let model = models.tiny();
    let home = Home::new("");
    let listed = home.json(&["config", "list", "--json"]);
    let mut tried = 0;
    for row in listed["settings"].as_array().unwrap() {
        // Not every choice is about placement.
        let Some(flag) = row["flag"].as_str() else { continue };
        for word in row["choices"].as_array().unwrap() {
            let args = ["plan", "-m", text(&model), "--json", flag, word.as_str().unwrap()];
            let ran = home.run(&args);
            let code = ran.json()["code"].as_str().unwrap_or_default().to_owned();
            assert!(!code.ends_with("_unknown") && !ran.stderr.contains("counts as"), "{args:?}: {ran:?}");
            tried += 1;
        }
    }
    assert!(tried >= 10, "{tried}");
}

#[test]
fn the_log_follows_the_file() {
    let models = Models::new();
    let home = Home::new("[diagnostics]\nlog = \"spillway=trace,info\"\n");
    let model = models.tiny();
    let args = ["run", "-m", text(&model), "-p", "x", "-n", "1", "-q"];
    let told = home.run(&args);
    assert!(told.code == Some(0) && !told.stderr.is_empty(), "{told:?}");
    home.write("[diagnostics]\nlog = \"error\"\ncpu_exec_trace = true\n");
    let told = home.run(&args);
    assert!(told.stderr.lines().count() > 0 && !told.stderr.contains("INFO"), "workers trace: {told:?}");
}

#[test]
fn loads_of_the_daemon_follow_the_file_and_a_broken_one_leaves_the_model_serving() {
    let models = Models::new();
    let model = models.tiny();
    let home = Home::new("[memory]\nmax_seq = 96\nparallel = 2\n[generation]\nmax_tokens = 5\n");
    let path = home.path();
    let mut daemon = Daemon::start_with_env(&[], &[("SPILLWAY_CONFIG", text(&path))]);
    let loaded = daemon.main.load(&model, json!({}));
    assert_eq!((&loaded["max_seq"], &loaded["parallel"]), (&json!(96), &json!(2)));
    let loaded = daemon.main.load(&model, json!({"max_seq": 128}));
    assert_eq!((&loaded["max_seq"], &loaded["parallel"]), (&json!(128), &json!(2)), "a parameter wins");
    let tokens = |daemon: &mut Daemon, fields: Value| {
        let mut request =
            json!({"type": "generate", "id": "g", "prompt": "the word", "raw": true, "ignore_eos": true});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        daemon.main.send(request);
        daemon.main.answer("g").1["tokens"].clone()
    };
    assert_eq!(tokens(&mut daemon, json!({})), json!(5));
    assert_eq!(tokens(&mut daemon, json!({"max_tokens": 2})), json!(2));

    home.write("[memory]\nmax_seq = \"long\"\n");
    daemon.main.send(json!({"type": "load", "id": "l", "model": model}));
    let (_, refused) = daemon.main.answer("l");
    assert_eq!((&refused["code"], &refused["class"]), (&json!("config_wrong_type"), &json!("validation")));
    assert!(refused["message"].as_str().unwrap().contains(&home.at(2)), "{refused}");
    assert_eq!(tokens(&mut daemon, json!({})), json!(5), "the model goes on as it was loaded");

    home.write("[generation]\nmax_tokens = 7\n");
    assert_eq!(tokens(&mut daemon, json!({})), json!(5), "read with the load, not with the request");
    daemon.main.load(&model, json!({}));
    assert_eq!(tokens(&mut daemon, json!({})), json!(7));
    daemon.finish();
}
