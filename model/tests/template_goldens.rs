//! Prompts against what Python's Jinja2 makes of the same template and conversation (oracle folder `templates`).

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use serde_json::{Map, Value};
use spillway_model::chat::{ChatRequest, ChatTemplate, TemplateError};
use spillway_model::testing::oracles;

fn render(template: &ChatTemplate, golden: &Value, case: &Value) -> Result<String, TemplateError> {
    let mut kwargs: Map<String, Value> = case["kwargs"].as_object().unwrap().clone();
    let mut flag = |name: &str| kwargs.remove(name).map(|value| value.as_bool().unwrap());
    let mut request = ChatRequest::new(&case["messages"]);
    request.add_generation_prompt = flag("add_generation_prompt").unwrap_or(false);
    request.continue_final_message = flag("continue_final_message").unwrap_or(false);
    request.enable_thinking = flag("enable_thinking");
    request.tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
    request.kwargs = kwargs;
    request.now = Some(golden["strftime_now"].as_str().unwrap().parse().unwrap());
    template.render(&request)
}

#[test]
fn prompts_agree_with_jinja2() {
    let Some(oracles) = oracles() else { return };
    let folder = oracles.join("templates");
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    assert_eq!(files.len(), 6);
    let mut wrong = Vec::new();
    for file in files {
        let golden: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let source = std::fs::read_to_string(folder.join(golden["template_file"].as_str().unwrap())).unwrap();
        let template = ChatTemplate::new(&source, None, None).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let result = render(&template, &golden, case);
            let right = match (case["error_kind"].as_str(), &result) {
                (None, Ok(prompt)) => case["expected"] == *prompt,
                (Some("refusal"), Err(TemplateError::Refused { message })) => case["error"] == *message,
                (Some("library"), Err(TemplateError::ContinueAndGenerate)) => true,
                (Some("undefined" | "type" | "recursion"), Err(TemplateError::Render { .. })) => true,
                _ => false,
            };
            if !right {
                let name = file.file_stem().unwrap().to_string_lossy();
                wrong.push(format!(
                    "{name}/{}: {result:?}\n  wanted {} {}",
                    case["name"], case["expected"], case["error"]
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cases differ:\n{}", wrong.len(), wrong.join("\n"));
}
