//! Tests of the etcd container in a seed's pod: the program creates the data directory, and then executes etcd (exec).

use std::os::unix::process::CommandExt as _;

use super::*;

/// The program of the etcd container, started as in the seed's pod.
pub(super) fn program(world: &World, settings: &DataDirectorySettings) -> std::process::Command {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_etcd-operator"));
    command
        .arg0(api::names::MANAGER_RESTORE)
        .args(["seed", "start"])
        .arg(format!("--volume={}", world.volume.path().display()))
        .arg(format!("--report={}", world.paths().report.display()))
        .arg(serde_json::to_string(settings).unwrap())
        .arg(&world.programs.etcd);
    command
}

/// The program creates the data directory and executes etcd. A later start needs only the data directory, without the
/// Secret, the backup and `restored.json`.
#[tokio::test]
async fn seed_program_creates_data_directory_and_executes_etcd() {
    let world = World::new("3.6").await;
    fetch(&world.fetch()).await.unwrap();
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let settings = world.prepare(&peer_url).settings;
    let mut member = Member::start_as(program(&world, &settings), &world.data(), &peer_url);
    let status = member
        .serves()
        .await
        .expect("etcd must start on the created data directory");
    assert_eq!(status.revision, world.revision);
    assert!(
        !world.paths().report.exists(),
        "a termination message would hide the exit reason of etcd"
    );
    drop(member);
    std::fs::remove_file(world.volume.path().join("restored.json")).unwrap();
    let nothing = DataDirectorySettings {
        tool: "/nowhere/etcdutl".into(),
        ..settings
    };
    let mut member = Member::start_as(program(&world, &nothing), &world.data(), &peer_url);
    let status = member
        .serves()
        .await
        .expect("etcd must start on the existing data directory");
    assert_eq!(status.revision, world.revision);
    drop(member);
    // The volume contains the temporary files that remain if the seed crashes after the rename of the data directory.
    std::fs::write(world.volume.path().join("restored.json"), "{}").unwrap();
    let work = world.volume.path().join("restore");
    std::fs::create_dir_all(&work).unwrap();
    std::fs::write(work.join("snapshot.db"), "left").unwrap();
    let mut member = Member::start_as(program(&world, &nothing), &world.data(), &peer_url);
    member
        .serves()
        .await
        .expect("etcd must start on the existing data directory");
    assert!(
        !work.exists(),
        "the fetched snapshot is still on the volume"
    );
}

#[tokio::test]
async fn failed_restore_is_reported_and_etcd_does_not_start() {
    let world = World::new("3.6").await;
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let settings = world.prepare(&peer_url).settings;
    let mut member = Member::start_as(program(&world, &settings), &world.data(), &peer_url);
    assert_eq!(member.serves().await, None);
    let report: Report =
        serde_json::from_slice(&std::fs::read(world.paths().report).unwrap()).unwrap();
    assert!(
        matches!(&report, Report::Failed { reason, message } if reason == "SeedFailed" && message.contains("no fetched snapshot")),
        "{report:?}"
    );
    assert!(!world.data().exists());
}

/// Another container may create an empty data directory before the etcd container starts.
#[tokio::test]
async fn empty_data_directory_counts_as_missing() {
    let world = World::new("3.6").await;
    std::fs::create_dir(world.data()).unwrap();
    fetch(&world.fetch()).await.unwrap();
    std::fs::create_dir(world.data()).unwrap();
    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let settings = world.prepare(&peer_url).settings;
    let mut member = Member::start_as(program(&world, &settings), &world.data(), &peer_url);
    let status = member
        .serves()
        .await
        .expect("etcd must start on the created data directory");
    assert_eq!(status.revision, world.revision);
}
