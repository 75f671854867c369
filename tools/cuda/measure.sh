#!/bin/sh
# What docs/kernels holds, measured on this machine: tools/cuda/measure.sh SLUICE OUT_DIR [ops|goldens|eval|engine|model|runtime]...
# Needs a build with SLUICE_CUDA=ON and one GPU; run it from the repository's root. Every part goes on when one fails; the
# exit code is 1 then.
set -u
sluice=$1
out=$2
shift 2
parts=${*:-ops goldens eval engine model runtime}
mkdir -p "$out"
failed=0

run() {  # FILE ARGUMENTS...: the command and its output
  file=$out/$1
  shift
  echo "\$ sluice $*" >> "$file"
  timeout "${limit:-${LIMIT:-200}}" "$sluice" "$@" >> "$file" 2>> "$out/log.txt" || { echo "FAILED: sluice $*" | tee -a "$file"; failed=1; }
}

ops() {
  limit=300
  run op_check-h200.txt bench ops --device cuda
  limit=
}

goldens() {
  for m in glm-moe-dsa deepseek-v32 deepseek-v3 deepseek-v2 glm4-moe-lite; do
    run goldens-h200.txt eval tests/data/tiny-random/$m --golden tests/data/tiny-random/$m --device cuda --dtype float32
  done
  run goldens-h200.txt eval models/ledger-28m-fp8 --golden tests/data/golden --device cuda --dtype float32
  run goldens-h200.txt eval models/ledger-28m-fp8 --golden tests/data/golden --device cuda --dtype bf16
  run goldens-h200.txt eval models/ledger-28m-fp8 --golden tests/data/golden --device cuda --kv-cache-dtype fp8_e4m3
}

answers() {
  qa="eval models/ledger-28m-fp8 --device cuda --dataset tests/data/eval/ledger_qa.jsonl"
  run eval-h200.txt $qa --passes warm --expected tests/data/eval/expected.json
  run eval-h200.txt $qa --limit 100 --passes cold,warm
  run eval-h200.txt $qa --limit 100 --passes cold,warm,l2,l3 --enable-hierarchical-cache --hicache-storage-backend file \
    --enable-deterministic-inference --kv-cache-dtype fp8_e4m3
  run eval-h200.txt $qa --limit 100 --passes cold,warm --enable-deterministic-inference --chunked-prefill-size 64 \
    --max-running-requests 4
}

# GLM-5 with 6 of its layers, fp8 weights, dummy values.
model() {
  dir=$(mktemp -d)
  python3 - "$dir" << 'P'
import json, sys
c = json.load(open('tests/data/configs/glm-5.2.json'))
c.update(num_hidden_layers=6, num_nextn_predict_layers=0, quantization_config={
    'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [128, 128]})
json.dump(c, open(sys.argv[1] + '/config.json', 'w'))
P
  flags=${MODEL_FLAGS:---prefill 4096,32768,131072 --decode-batch 1,32,128 --decode-context 32768 --cached 131072 --extend 512 --rounds 1}
  limit=500
  run bench-model-h200.txt bench model "$dir" --device cuda --load-format dummy --kv-cache-dtype fp8_e4m3 \
    --chunked-prefill-size 4096 --context-length 140000 $flags --json "$out/bench-model-glm5-6-layers-h200.json"
  run bench-engine-h200.txt bench model "$dir" --device cuda --load-format dummy --kv-cache-dtype fp8_e4m3 \
    --chunked-prefill-size 4096 --context-length 40000 --decode-context 32768 --engine-batch 1,32,128 \
    --json "$out/bench-engine-glm5-6-layers-h200.json"
  limit=
  rm -r "$dir"
}

engine() {
  echo "\$ tools/cuda/engine_check.py sluice" >> "$out/engine-h200.txt"
  "$(dirname "$0")/engine_check.py" "$sluice" >> "$out/engine-h200.txt" 2>> "$out/log.txt" || { echo "FAILED: engine_check" >> "$out/engine-h200.txt"; failed=1; }
}

# Planned memory, checked steps, hangs, faults, pinned memory and copies (DEVICE_TEST: the program cuda_device_test), then
# a model and a server whose steps are checked.
runtime() {
  file=$out/runtime-h200.txt
  device_test=${DEVICE_TEST:-$(dirname "$sluice")/../src/backends/cuda/cuda_device_test}
  echo '$ cuda_device_test' >> "$file"
  timeout 200 "$device_test" --gtest_brief=0 >> "$file" 2>&1 || { echo "FAILED: cuda_device_test" | tee -a "$file"; failed=1; }
  qa="eval models/ledger-28m-fp8 --device cuda --dataset tests/data/eval/ledger_qa.jsonl"
  for io in direct kernel; do
    run runtime-h200.txt $qa --limit 40 --passes cold,warm,l2 --enable-hierarchical-cache --hicache-io-backend $io \
      --hicache-mem-layout layer_first --enable-deterministic-inference --kv-cache-dtype fp8_e4m3 --debug-device
  done
  run runtime-h200.txt $qa --limit 40 --passes cold,l2 --enable-hierarchical-cache --hicache-io-backend kernel \
    --hicache-mem-layout page_first --enable-deterministic-inference --kv-cache-dtype fp8_e4m3 --debug-device
  port=31991
  echo "\$ sluice serve --model-path models/ledger-28m-fp8 --device cuda --debug-device --port $port" >> "$file"
  "$sluice" serve --model-path models/ledger-28m-fp8 --device cuda --debug-device --port $port >> "$file" 2>&1 &
  server=$!
  python3 - $port >> "$file" 2>&1 << 'P' || { echo "FAILED: sluice serve" | tee -a "$file"; failed=1; }
import concurrent.futures, json, sys, time, urllib.request
url = f'http://127.0.0.1:{sys.argv[1]}'
def post(path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {'Content-Type': 'application/json'})
    return json.load(urllib.request.urlopen(request, timeout=60))
for _ in range(600):
    try:
        urllib.request.urlopen(url + '/health', timeout=1)
        break
    except OSError:
        time.sleep(0.1)
info = json.load(urllib.request.urlopen(url + '/server_info'))
print('\n'.join(n for n in info['notices'] if 'warm-up' in n or 'memory' in n))
def one(i):
    return post('/generate', {'text': f'{i} ' * (i % 7 * 40 + 1), 'sampling_params': {'max_new_tokens': 40, 'ignore_eos': True,
                                                                                      'temperature': i % 2}})
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    answers = list(pool.map(one, range(200)))
print(f'{len(answers)} requests answered, every step checked,',
      sum(a['meta_info']['completion_tokens'] for a in answers), 'tokens')
P
  kill $server 2> /dev/null && wait $server
}

for part in $parts; do
  case $part in
    ops) ops ;;
    goldens) goldens ;;
    eval) answers ;;
    engine) engine ;;
    model) model ;;
    runtime) runtime ;;
    *) echo "measure.sh: unknown part $part" >&2; exit 2 ;;
  esac
done
exit $failed
