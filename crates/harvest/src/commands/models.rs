//! `harvest models`: lists the model services, their keys and their models.

use anyhow::Result;
use harvest_proto::{
    AgentName,
    api::{KeySource, ModelService, ServiceModels},
};

use crate::{Invocation, client::Client, table};

pub(crate) async fn run(ctx: &Invocation) -> Result<u8> {
    let services: Vec<ServiceModels> = Client::find(&ctx.config)?.all("/v1/models").await?;
    ctx.print.result(&services, |services| {
        let row = |one: &ServiceModels| {
            let models = one.problem.clone().unwrap_or_else(|| one.models.len().to_string());
            let service = &one.service;
            let agents = Vec::from_iter(service.agents.iter().map(AgentName::as_str)).join(", ");
            let agents = if agents.is_empty() { "–".to_owned() } else { agents };
            let (name, kind) = (service.name.to_string(), service.kind.to_string());
            [name, kind, describe_key(service), agents, models]
        };
        let table =
            table::plain(["SERVICE", "KIND", "KEY", "AGENTS", "MODELS"], services.iter().map(row));
        let models: String = services.iter().flat_map(references).collect();
        if models.is_empty() { table } else { format!("{table}\n{models}") }
    })?;
    let unusable = services.iter().find(|one| one.service.key == KeySource::Missing);
    if let Some(secret) = unusable.and_then(|one| one.service.secret.as_ref()) {
        ctx.print.hint(format!("store a key with `harvest secret set {secret}`"));
    }
    Ok(0)
}

/// The models as `--model` takes them, one per line.
fn references(one: &ServiceModels) -> Vec<String> {
    let name = &one.service.name;
    let reference = |model: &String| match *model == **name {
        true => format!("{name}\n"),
        false => format!("{name}/{model}\n"),
    };
    one.models.iter().map(reference).collect()
}

fn describe_key(service: &ModelService) -> String {
    let secret = service.secret.as_deref().unwrap_or_default();
    match service.key {
        KeySource::Stored => format!("{secret} (stored)"),
        KeySource::Environment => format!("{secret} (environment)"),
        KeySource::Missing => format!("{secret} (missing)"),
        KeySource::NotNeeded => "not needed".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_printed_as_the_flag_takes_them() {
        let mut services = ModelService::built_in();
        services[1].key = KeySource::Missing;
        services[1].secret = Some("OPENAI_API_KEY".to_owned());
        assert_eq!(describe_key(&services[1]), "OPENAI_API_KEY (missing)");
        let with = |index: usize, models: &[&str]| ServiceModels {
            service: services[index].clone(),
            models: models.iter().map(|model| (*model).to_owned()).collect(),
            problem: None,
        };
        assert_eq!(references(&with(0, &["claude-x"])), ["anthropic/claude-x\n"]);
        assert_eq!(references(&with(2, &["scripted"])), ["scripted\n"]);
        for line in references(&with(1, &["gpt", "owner/gpt"])) {
            assert!(line.trim().parse::<harvest_proto::ModelRef>().is_ok(), "{line}");
        }
    }
}
