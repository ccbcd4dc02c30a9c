//! `harvest schedule`: the job that keeps the builds of repositories fresh.

use anyhow::Result;
use harvest_proto::api::{RunStatus, Schedule, ScheduleRun};
use serde_json::json;

use super::ls::age;
use crate::{Invocation, cli::ScheduleCommand, client::Client, sanitize::sanitize};

pub(crate) async fn run(ctx: &Invocation, verb: ScheduleCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        ScheduleCommand::Ls => show(ctx, &client.get("/v1/schedule").await?)?,
        ScheduleCommand::Runs => {
            let runs: Vec<ScheduleRun> = client.all("/v1/schedule/runs").await?;
            if runs.is_empty() && !ctx.print.json {
                ctx.print.note("No runs yet");
                ctx.print.hint("`harvest schedule run` runs it now");
                return Ok(0);
            }
            ctx.print.list(&runs, ["AGE", "STATUS", "BUILDS", "REBUILT…", "FAILED…"], row)?;
        }
        ScheduleCommand::Run => {
            ctx.print.note("Looking at every repository");
            let run: ScheduleRun = client.post("/v1/schedule/run", &json!({})).await?;
            ctx.print.document(&run)?;
            for image in &run.images {
                ctx.print.note(format!("Built image {}", sanitize(image)));
            }
            for name in &run.rebuilt {
                ctx.print.note(format!("Built {name}"));
            }
            if !run.image_rebuilt && run.status == RunStatus::Success {
                ctx.print.note("Nothing has moved");
            }
            if run.status == RunStatus::Failed {
                ctx.print.warn(&run.tail);
                ctx.print.hint("`harvest repo logs NAME` prints the log of a build");
                return Ok(1);
            }
        }
        ScheduleCommand::Pause => {
            show(ctx, &client.post("/v1/schedule/pause", &json!({})).await?)?;
        }
        ScheduleCommand::Resume => {
            show(ctx, &client.post("/v1/schedule/resume", &json!({})).await?)?;
        }
    }
    Ok(0)
}

fn show(ctx: &Invocation, schedule: &Schedule) -> Result<()> {
    ctx.print.result(schedule, |schedule| {
        let state = match (schedule.disabled, schedule.paused) {
            (true, _) => "switched off (`schedule = true` in harvest.toml switches it on)",
            (false, true) => "paused (`harvest schedule resume` resumes it)",
            (false, false) => "active",
        };
        let last = schedule.last.as_ref();
        let last = last.map_or_else(
            || "none".to_owned(),
            |run| format!("{} ago, {}", age(run.timestamp), run.status),
        );
        format!(
            "rebuild       {} (every half hour)\nstate         {state}\nlast run      {last}\n",
            schedule.cron
        )
    })
}

fn row(run: &ScheduleRun) -> [String; 5] {
    let images = run.images.iter().map(|image| sanitize(image));
    let rebuilt: Vec<String> =
        images.chain(run.rebuilt.iter().map(|name| name.to_string())).collect();
    [
        age(run.timestamp),
        run.status.to_string(),
        run.attempts.to_string(),
        rebuilt.join(", "),
        sanitize(&run.tail.replace('\n', "; ")),
    ]
}
