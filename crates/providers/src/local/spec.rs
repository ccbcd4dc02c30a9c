//! Converts API requests to engine specs, and engine sandboxes to API types. Pure.

use harvest_engine::{
    Image, Inspected, Limits, Network, Origin, Owner, ParseVolumeNameError, SandboxState, Spec,
    VolumeMount,
};
use harvest_proto::{
    api::{
        Sandbox, SandboxLimits, SandboxNetwork, SandboxOwner, SandboxStatus, VolumeMount as Mount,
    },
    launch::NetworkSettings,
};
use harvest_session::sandboxes::{SandboxError, SandboxSpec, StartFrom, StateVolume};

/// The engine's spec, without the state volume, and that volume.
pub(super) fn engine_spec(
    spec: SandboxSpec,
    default_limits: &Limits,
) -> Result<(Spec, Option<StateVolume>), SandboxError> {
    let state = spec.state;
    let spec = Spec {
        id: spec.id,
        from: match spec.from {
            StartFrom::Image(name) => Origin::Image(name),
            StartFrom::Snapshot(snapshot) => Origin::Snapshot(snapshot),
        },
        limits: limits(spec.limits, default_limits),
        network: match spec.network {
            SandboxNetwork::None => Network::Nothing,
            SandboxNetwork::Gateway => Network::Door,
            SandboxNetwork::Host => Network::Host,
        },
        owner: match spec.owner {
            SandboxOwner::Standalone => Owner::Standalone,
            SandboxOwner::Session => Owner::Sessions,
            SandboxOwner::Process(pid) => Owner::Process(pid),
        },
        binds: Vec::new(),
        volumes: spec.volumes.into_iter().map(mount).collect::<Result<_, _>>()?,
        env: spec.env,
        door: spec.door,
        settings: NetworkSettings::default(),
        made_by: spec.made_by,
    };
    Ok((spec, state))
}

fn limits(given: SandboxLimits, default: &Limits) -> Limits {
    Limits {
        memory_bytes: given.memory_bytes.unwrap_or(default.memory_bytes),
        cpu_millis_per_second: given.cpu_millis_per_second.unwrap_or(default.cpu_millis_per_second),
        pids: given.pids.unwrap_or(default.pids),
        writable_bytes: given.writable_bytes.or(default.writable_bytes),
        lifetime_secs: given.lifetime_secs.or(default.lifetime_secs),
    }
}

fn mount(given: Mount) -> Result<VolumeMount, SandboxError> {
    let invalid = |what: String| SandboxError::invalid("invalid_volume", what);
    if !given.inside.starts_with('/') {
        return Err(invalid(format!("volume path `{}` is not absolute", given.inside)));
    }
    let name =
        given.name.parse().map_err(|error: ParseVolumeNameError| invalid(error.to_string()))?;
    Ok(VolumeMount { name, inside: given.inside.into(), read_only: given.read_only })
}

pub(super) fn api_sandbox(sandbox: Inspected, images: &[Image]) -> Sandbox {
    let image = image(&sandbox, images).map(str::to_owned);
    let Inspected { spec, created_at, state } = sandbox;
    let (state, reason, pid) = match state {
        SandboxState::Running(running) => (SandboxStatus::Running, None, Some(running.pid)),
        SandboxState::Dead { reason } => (SandboxStatus::Dead, Some(reason), None),
        SandboxState::Gone => (SandboxStatus::Dead, Some("gone".to_owned()), None),
    };
    let (layers, config) = match spec.from {
        Origin::Layers { layers, config } => (layers, config),
        // `inspect` always resolves the origin to layers.
        Origin::Image(_) | Origin::Snapshot(_) => Default::default(),
    };
    Sandbox {
        id: spec.id,
        state,
        reason,
        pid,
        image,
        owner: owner(spec.owner),
        made_by: spec.made_by,
        network: match spec.network {
            Network::Nothing => SandboxNetwork::None,
            Network::Door => SandboxNetwork::Gateway,
            Network::Host => SandboxNetwork::Host,
        },
        door: spec.door,
        limits: SandboxLimits {
            memory_bytes: Some(spec.limits.memory_bytes),
            cpu_millis_per_second: Some(spec.limits.cpu_millis_per_second),
            pids: Some(spec.limits.pids),
            writable_bytes: spec.limits.writable_bytes,
            lifetime_secs: spec.limits.lifetime_secs,
        },
        volumes: spec.volumes.into_iter().map(api_mount).collect(),
        env: spec.env,
        user: config.user,
        workdir: config.workdir,
        layers: layers.into_iter().map(String::from).collect(),
        created_at,
    }
}

fn api_mount(mount: VolumeMount) -> Mount {
    let inside = mount.inside.to_string_lossy().into_owned();
    Mount { name: mount.name.to_string(), inside, read_only: mount.read_only }
}

/// The image that shares the most layers with the sandbox.
fn image<'a>(sandbox: &Inspected, images: &'a [Image]) -> Option<&'a str> {
    let Origin::Layers { layers, .. } = &sandbox.spec.from else { return None };
    let bases = images.iter().filter(|image| layers.starts_with(&image.layers));
    bases.max_by_key(|image| image.layers.len()).map(|image| image.name.as_str())
}

pub(super) const fn owner(owner: Owner) -> SandboxOwner {
    match owner {
        Owner::Standalone => SandboxOwner::Standalone,
        Owner::Sessions => SandboxOwner::Session,
        Owner::Process(pid) => SandboxOwner::Process(pid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_volumes_are_refused() {
        for (name, inside) in [("../x", "/a"), ("data", "relative")] {
            let given = Mount { name: name.into(), inside: inside.into(), read_only: false };
            assert!(mount(given).is_err(), "{name} at {inside}");
        }
    }

    #[test]
    fn absent_limits_are_the_defaults() {
        assert_eq!(limits(SandboxLimits::default(), &Limits::default()), Limits::default());
    }
}
